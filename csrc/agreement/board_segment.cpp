#include "agreement/board_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>

#include "core/format.h"

namespace kvburst {
namespace {

// Opened as files: shm_open does no more, and needs a library of its own in older systems.
constexpr const char* kFolder = "/dev/shm/";
constexpr const char* kPrefix = "kvburst-";
constexpr std::size_t kRandomDigits = 32;
constexpr const char* kDigits = "0123456789abcdef";

constexpr std::uint64_t kMagic = 0x6472616f6270766bU;
constexpr std::uint32_t kVersion = 1;

[[noreturn]] void throw_errno(const std::string& name, const char* call) {
  const int code = errno;
  throw BoardError(
      text(kFolder, name, ": ", call, " failed with ", code, " (", std::strerror(code), ")"));
}

template <class Bytes>
void fill_randomly(Bytes& bytes) {
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    throw BoardError(text("getrandom failed with ", errno, " (", std::strerror(errno), ")"));
  }
}

std::string random_name() {
  std::array<unsigned char, kRandomDigits / 2> bytes;
  fill_randomly(bytes);
  std::string name = kPrefix;
  for (const unsigned char byte : bytes) {
    name += kDigits[byte >> 4];
    name += kDigits[byte & 15];
  }
  return name;
}

std::uint64_t random_nonce() {
  std::array<unsigned char, sizeof(std::uint64_t)> bytes;
  fill_randomly(bytes);
  std::uint64_t nonce = 0;
  std::memcpy(&nonce, bytes.data(), sizeof nonce);
  return nonce >> 1;
}

bool is_segment_name(const std::string& name) {
  const std::size_t prefix = std::strlen(kPrefix);
  return name.size() == prefix + kRandomDigits && name.compare(0, prefix, kPrefix) == 0 &&
         name.find_first_not_of(kDigits, prefix) == std::string::npos;
}

std::string path_of(const std::string& name) { return kFolder + name; }

/// A lock of the open file, and not of the process: closing another descriptor of the same file
/// does not drop it, and ranks that share a process exclude each other too.
struct flock lock_on(off_t first, off_t bytes) {
  struct flock lock{};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = first;
  lock.l_len = bytes;
  return lock;
}

/// Throws the first difference between what the segment has and what was said.
template <class Number>
void check_same(const std::string& name, const char* what, Number has, Number said) {
  if (has != said) {
    throw BoardError(text(kFolder, name, ": its ", what, " is ", has, ", and not ", said));
  }
}

}  // namespace

struct alignas(256) BoardSegment::Header {
  /// Written last.
  std::atomic<std::uint64_t> magic;
  std::uint32_t version;
  std::uint64_t nonce;
  BoardShape shape;
};

/// The process of a rank.
struct alignas(64) BoardSegment::Occupant {
  std::atomic<std::uint32_t> moved_in;
  ProcessIdentity process;
};

std::size_t BoardSegment::bytes(const BoardShape& shape) {
  const std::size_t occupants = (static_cast<std::size_t>(shape.ranks) + 3) / 4 * 256;
  return sizeof(Header) + occupants + shape.bytes();
}

BoardSegment::Header& BoardSegment::header() const { return *reinterpret_cast<Header*>(mapping_); }

BoardSegment::Occupant& BoardSegment::occupant(int rank) const {
  return reinterpret_cast<Occupant*>(mapping_ + sizeof(Header))[rank];
}

std::byte* BoardSegment::memory() const { return mapping_ + bytes(shape_) - shape_.bytes(); }

BoardSegment::BoardSegment(std::string name, int file, std::uint64_t nonce, const BoardShape& shape,
                           int rank)
    : name_(std::move(name)), file_(file), nonce_(nonce), shape_(shape), rank_(rank) {}

BoardSegment::~BoardSegment() { leave(); }

void BoardSegment::leave() {
  if (std::byte* const mapped = std::exchange(mapping_, nullptr)) munmap(mapped, bytes(shape_));
  if (const int file = std::exchange(file_, -1); file >= 0) ::close(file);
}

std::shared_ptr<BoardSegment> BoardSegment::create(const BoardShape& shape) {
  shape.check();
  for (;;) {
    std::string name = random_name();
    const int file =
        open(path_of(name).c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (file < 0) throw_errno(name, "open");
    const std::shared_ptr<BoardSegment> segment(
        new BoardSegment(std::move(name), file, random_nonce(), shape, 0));
    try {
      // Until the lock is there, another process' sweep takes the file for one that was left.
      struct stat status{};
      if (!segment->try_lock()) continue;
      if (fstat(file, &status) != 0) throw_errno(segment->name_, "fstat");
      if (status.st_nlink == 0) continue;
      if (fchmod(file, 0600) != 0) throw_errno(segment->name_, "fchmod");
      // Unlike ftruncate it takes the memory now: a full /dev/shm would end the process later.
      const int code = posix_fallocate(file, 0, static_cast<off_t>(bytes(shape)));
      if (code != 0) {
        errno = code;
        throw_errno(segment->name_, "posix_fallocate");
      }
      segment->map();
    } catch (...) {
      segment->unlink();
      throw;
    }
    Header& header = segment->header();
    header.version = kVersion;
    header.nonce = segment->nonce_;
    header.shape = shape;
    header.magic.store(kMagic, std::memory_order_release);
    segment->move_in();
    return segment;
  }
}

std::shared_ptr<BoardSegment> BoardSegment::attach(const std::string& name, std::uint64_t nonce,
                                                   const BoardShape& shape, int rank) {
  shape.check();
  shape.check_rank(rank);
  if (!is_segment_name(name)) {
    throw BoardUseError(text("name: '", name, "' is not '", kPrefix, "' and ", kRandomDigits,
                             " digits of base 16"));
  }
  const int file = open(path_of(name).c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  if (file < 0) throw_errno(name, "open");
  const std::shared_ptr<BoardSegment> segment(new BoardSegment(name, file, nonce, shape, rank));
  segment->check_file();
  segment->map();
  segment->check_header();
  if (!segment->try_lock()) {
    throw BoardError(text(kFolder, name, ": rank ", rank, " is attached already"));
  }
  segment->move_in();
  return segment;
}

void BoardSegment::map() {
  void* const mapped =
      mmap(nullptr, bytes(shape_), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file_, 0);
  if (mapped == MAP_FAILED) throw_errno(name_, "mmap");
  mapping_ = static_cast<std::byte*>(mapped);
}

bool BoardSegment::try_lock() {
  struct flock lock = lock_on(rank_, 1);
  if (fcntl(file_, F_OFD_SETLK, &lock) == 0) return true;
  if (errno != EAGAIN && errno != EACCES) throw_errno(name_, "fcntl(F_OFD_SETLK)");
  return false;
}

void BoardSegment::move_in() {
  Occupant& own = occupant(rank_);
  own.process = ProcessIdentity::own();
  own.moved_in.store(1, std::memory_order_release);
}

void BoardSegment::check_file() const {
  struct stat status{};
  if (fstat(file_, &status) != 0) throw_errno(name_, "fstat");
  if (!S_ISREG(status.st_mode)) {
    throw BoardError(text(kFolder, name_, ": is not a regular file"));
  }
  check_same(name_, "owner", status.st_uid, geteuid());
  if ((status.st_mode & 07777) != 0600) {
    throw BoardError(text(kFolder, name_, ": its mode is ", std::oct, status.st_mode & 07777,
                          ", and not 600: others may write to it"));
  }
  // Before it is mapped: what lies beyond the end of a file may not be touched.
  if (static_cast<std::size_t>(status.st_size) < sizeof(Header)) {
    throw BoardError(text(kFolder, name_, ": ", status.st_size, " bytes are too few for a board"));
  }
}

void BoardSegment::check_header() const {
  const Header& found = header();
  check_same(name_, "magic", found.magic.load(std::memory_order_acquire), kMagic);
  check_same(name_, "version", found.version, kVersion);
  check_same(name_, "nonce", found.nonce, nonce_);
  check_same(name_, "number of ranks", found.shape.ranks, shape_.ranks);
  check_same(name_, "number of values", found.shape.values, shape_.values);
  check_same(name_, "lag", found.shape.lag, shape_.lag);
  struct stat status{};
  if (fstat(file_, &status) != 0) throw_errno(name_, "fstat");
  check_same(name_, "size in bytes", static_cast<std::size_t>(status.st_size), bytes(shape_));
}

void BoardSegment::unlink() {
  if (::unlink(path_of(name_).c_str()) != 0 && errno != ENOENT) throw_errno(name_, "unlink");
}

bool BoardSegment::ended(int rank) const {
  const Occupant& other = occupant(rank);
  // The lock of this very descriptor would not be seen.
  if (rank == rank_ || other.moved_in.load(std::memory_order_acquire) == 0) return false;
  struct flock lock = lock_on(rank, 1);
  const bool unlocked = fcntl(file_, F_OFD_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
  return unlocked || other.process.ended();
}

std::string BoardSegment::process(int rank) const {
  const Occupant& other = occupant(rank);
  if (other.moved_in.load(std::memory_order_acquire) == 0) return "never attached";
  return other.process.words();
}

int BoardSegment::sweep() {
  int removed = 0;
  std::error_code unreadable;
  for (const auto& entry : std::filesystem::directory_iterator(kFolder, unreadable)) {
    const std::string name = entry.path().filename();
    if (!is_segment_name(name)) continue;
    const int file = open(entry.path().c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (file < 0) continue;
    struct stat status{};
    // Locking all of it fails while any rank is there, and keeps new ones out.
    struct flock everything = lock_on(0, 0);
    if (fstat(file, &status) == 0 && S_ISREG(status.st_mode) && status.st_uid == geteuid() &&
        fcntl(file, F_OFD_SETLK, &everything) == 0 && ::unlink(entry.path().c_str()) == 0) {
      ++removed;
    }
    ::close(file);
  }
  return removed;
}

}  // namespace kvburst
