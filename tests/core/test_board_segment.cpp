#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "agreement/board_segment.h"
#include "agreement/process_identity.h"
#include "refusals.h"

using namespace kvburst;
using namespace kvburst::testing;

namespace {

constexpr BoardShape kShape{.ranks = 3, .values = 2, .lag = 1};

std::filesystem::path path_of(const std::string& name) { return "/dev/shm/" + name; }

/// A segment whose name goes with the test, passed or failed.
struct Segment {
  explicit Segment(const BoardShape& shape = kShape) : first(BoardSegment::create(shape)) {}
  ~Segment() {
    if (first) first->unlink();
  }

  std::shared_ptr<BoardSegment> attach(int rank, const BoardShape& shape = kShape) const {
    return BoardSegment::attach(name, nonce, shape, rank);
  }
  std::filesystem::path path() const { return path_of(name); }

  std::shared_ptr<BoardSegment> first;
  std::string name = first->name();
  std::uint64_t nonce = first->nonce();
};

/// A child that does `body`, then sleeps until it is killed.
class Child {
 public:
  template <class Body>
  explicit Child(Body body) {
    int ends[2];
    REQUIRE(pipe(ends) == 0);
    pid_ = fork();
    if (pid_ == 0) {
      const auto result = body();
      const char done = 1;
      if (write(ends[1], &done, 1) == 1) pause();
      _exit(static_cast<int>(result != nullptr));
    }
    char done = 0;
    REQUIRE(read(ends[0], &done, 1) == 1);
    close(ends[0]);
    close(ends[1]);
  }
  ~Child() {
    kill();
    reap();
  }

  pid_t pid() const { return pid_; }
  void kill() const { ::kill(pid_, SIGKILL); }
  /// Returns once it has ended; it stays a zombie.
  void wait() const {
    siginfo_t info{};
    REQUIRE(waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOWAIT) == 0);
  }
  void reap() {
    if (!reaped_) waitpid(pid_, nullptr, 0);
    reaped_ = true;
  }

 private:
  pid_t pid_ = -1;
  bool reaped_ = false;
};

}  // namespace

TEST_CASE("a segment is there, zeroed, and nobody else's to open, until it is unlinked") {
  const Segment segment;
  struct stat status{};
  REQUIRE(stat(segment.path().c_str(), &status) == 0);
  CHECK((status.st_mode & 07777) == 0600);
  CHECK(status.st_uid == geteuid());
  for (std::size_t i = 0; i < kShape.bytes(); ++i) {
    REQUIRE(segment.first->memory()[i] == std::byte{0});
  }
  CHECK(reinterpret_cast<std::uintptr_t>(segment.first->memory()) % 256 == 0);
  segment.first->unlink();
  segment.first->unlink();
  CHECK(!std::filesystem::exists(segment.path()));
}

TEST_CASE("a segment's mode does not depend on the umask") {
  const mode_t before = umask(0277);
  std::optional<Segment> segment;
  segment.emplace();
  umask(before);
  CHECK_NOTHROW(segment->attach(1));
}

TEST_CASE("two segments have different names and nonces") {
  const Segment one;
  const Segment other;
  CHECK(one.name != other.name);
  CHECK(one.nonce != other.nonce);
}

TEST_CASE("all ranks see the same memory, before and after the name is gone") {
  const Segment segment;
  const auto second = segment.attach(1);
  segment.first->unlink();
  segment.first->memory()[kShape.bytes() - 1] = std::byte{7};
  CHECK(second->memory()[kShape.bytes() - 1] == std::byte{7});
  CHECK(second->memory() != segment.first->memory());
}

TEST_CASE("what is not the segment that was meant is refused by name") {
  const Segment segment;
  const auto refused = [&](std::uint64_t nonce, BoardShape shape,
                           std::initializer_list<std::string> words) {
    check_refused<BoardError>([&] { BoardSegment::attach(segment.name, nonce, shape, 1); }, words);
  };
  refused(segment.nonce + 1, kShape, {segment.name, "nonce", std::to_string(segment.nonce)});
  refused(segment.nonce, {4, 2, 1}, {segment.name, "number of ranks is 3", "not 4"});
  refused(segment.nonce, {3, 5, 1}, {segment.name, "number of values is 2", "not 5"});
  refused(segment.nonce, {3, 2, 2}, {segment.name, "lag is 1", "not 2"});
  // A shape that would need more memory than there is.
  refused(segment.nonce, {1024, 31, 16}, {segment.name, "number of ranks is 3"});
  CHECK_NOTHROW(segment.attach(1));
}

TEST_CASE("names and ranks that no segment has are refused by name") {
  const Segment segment;
  for (const std::string name :
       {"", "kvburst-", "../etc/passwd", "kvburst-../../../../etc/passwd0"}) {
    check_refused<BoardUseError>([&] { BoardSegment::attach(name, 0, kShape, 1); }, {"name", name});
  }
  for (const int rank : {-1, 3}) {
    check_refused<BoardUseError>([&] { segment.attach(rank); }, {"rank", "0 to 2"});
  }
  const std::string gone = "kvburst-00000000000000000000000000000000";
  check_refused<BoardError>([&] { BoardSegment::attach(gone, 0, kShape, 1); },
                            {gone, "No such file"});
}

TEST_CASE("a rank is had by one process at a time") {
  const Segment segment;
  check_refused<BoardError>([&] { segment.attach(0); }, {"rank 0", "attached already"});
  auto second = segment.attach(1);
  check_refused<BoardError>([&] { segment.attach(1); }, {"rank 1", "attached already"});
  second->leave();
  second->leave();
  CHECK_NOTHROW(segment.attach(1));
}

TEST_CASE("a file that others may open, or that is too short, is refused") {
  const Segment segment;
  REQUIRE(chmod(segment.path().c_str(), 0660) == 0);
  check_refused<BoardError>([&] { segment.attach(1); }, {segment.name, "mode is 660", "not 600"});
  REQUIRE(chmod(segment.path().c_str(), 0600) == 0);

  const std::string name = "kvburst-11111111111111111111111111111111";
  for (const off_t size : {0, 8}) {
    const int file = open(path_of(name).c_str(), O_RDWR | O_CREAT, 0600);
    REQUIRE(file >= 0);
    REQUIRE(ftruncate(file, size) == 0);
    close(file);
    check_refused<BoardError>([&] { BoardSegment::attach(name, 0, kShape, 1); },
                              {name, std::to_string(size) + " bytes are too few"});
    std::filesystem::remove(path_of(name));
  }
}

TEST_CASE("a segment that was cut short since is refused") {
  const Segment segment;
  REQUIRE(truncate(segment.path().c_str(), 512) == 0);
  check_refused<BoardError>([&] { segment.attach(1); }, {segment.name, "size in bytes is 512"});
}

TEST_CASE("another file under a segment's name is refused") {
  const std::string name = "kvburst-22222222222222222222222222222222";
  std::ofstream(path_of(name)) << std::string(4096, 'x');
  REQUIRE(chmod(path_of(name).c_str(), 0600) == 0);
  check_refused<BoardError>([&] { BoardSegment::attach(name, 0, kShape, 1); }, {name, "magic"});
  std::filesystem::remove(path_of(name));

  std::filesystem::create_symlink("/etc/hostname", path_of(name));
  check_refused<BoardError>([&] { BoardSegment::attach(name, 0, kShape, 1); }, {name, "symbolic"});
  std::filesystem::remove(path_of(name));
}

TEST_CASE("a segment of another user is refused, and not swept") {
  // Only root can give a file away.
  if (geteuid() != 0) return;
  const Segment segment;
  REQUIRE(chown(segment.path().c_str(), 12345, 12345) == 0);
  check_refused<BoardError>([&] { segment.attach(1); }, {segment.name, "owner is 12345", "not 0"});
  segment.first->leave();
  BoardSegment::sweep();
  CHECK(std::filesystem::exists(segment.path()));
}

// --- who is still there --------------------------------------------------------------------------

TEST_CASE("a rank that is attached has not ended, and one that never was cannot be told") {
  const Segment segment;
  const auto second = segment.attach(1);
  for (const int rank : {0, 1, 2}) CHECK(!segment.first->ended(rank));
  CHECK(segment.first->process(1) == "pid " + std::to_string(getpid()));
  CHECK(segment.first->process(2) == "never attached");
}

TEST_CASE("a rank whose process was killed has ended, before and after it is reaped") {
  const Segment segment;
  Child child([&] { return segment.attach(1); });
  CHECK(!segment.first->ended(1));
  CHECK(segment.first->process(1) == "pid " + std::to_string(child.pid()));
  child.kill();
  child.wait();
  CHECK(segment.first->ended(1));
  child.reap();
  CHECK(segment.first->ended(1));
}

TEST_CASE("a rank that was killed has ended although a child of its own keeps its files open") {
  const Segment segment;
  // The grandchild ends when its end of this pipe is closed.
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  {
    Child child([&] {
      auto attached = segment.attach(1);
      if (fork() == 0) {
        close(ends[1]);
        char end = 0;
        _exit(static_cast<int>(read(ends[0], &end, 1)));
      }
      return attached;
    });
    CHECK(!segment.first->ended(1));
    child.kill();
    child.wait();
    CHECK(segment.first->ended(1));
    // Otherwise the case is not the one that was meant: the lock is still there.
    check_refused<BoardError>([&] { segment.attach(1); }, {"attached already"});
  }
  close(ends[0]);
  close(ends[1]);
}

TEST_CASE("a stopped process has not ended") {
  const Segment segment;
  const Child child([&] { return segment.attach(1); });
  ::kill(child.pid(), SIGSTOP);
  siginfo_t info{};
  REQUIRE(waitid(P_PID, static_cast<id_t>(child.pid()), &info, WSTOPPED | WNOWAIT) == 0);
  CHECK(!segment.first->ended(1));
}

TEST_CASE("a process is told from a later one that has its pid, and from one it cannot see") {
  const ProcessIdentity own = ProcessIdentity::own();
  CHECK(!own.ended());
  ProcessIdentity earlier = own;
  --earlier.started;
  CHECK(earlier.ended());
  ProcessIdentity elsewhere = earlier;
  ++elsewhere.name_space;
  CHECK(!elsewhere.ended());
  elsewhere.name_space = 0;
  CHECK(!elsewhere.ended());
}

// --- what is left ------------------------------------------------------------------------------

TEST_CASE("a segment of killed processes is swept, and one of living ones is not") {
  const Segment living;
  std::string left;
  {
    int ends[2];
    REQUIRE(pipe(ends) == 0);
    Child child([&] {
      auto segment = BoardSegment::create(kShape);
      const std::string& name = segment->name();
      return write(ends[1], name.data(), name.size()) > 0 ? segment : nullptr;
    });
    char name[64];
    left.assign(name, static_cast<std::size_t>(read(ends[0], name, sizeof name)));
    close(ends[0]);
    close(ends[1]);
    BoardSegment::sweep();
    CHECK(std::filesystem::exists(path_of(left)));
  }
  BoardSegment::sweep();
  CHECK(!std::filesystem::exists(path_of(left)));
  CHECK(std::filesystem::exists(living.path()));
  CHECK_NOTHROW(living.attach(1));
}

TEST_CASE("a segment is not swept while any rank is there, whichever it is") {
  Segment segment;
  const auto last = segment.attach(2);
  segment.first->leave();
  BoardSegment::sweep();
  CHECK(std::filesystem::exists(segment.path()));
  last->leave();
  BoardSegment::sweep();
  CHECK(!std::filesystem::exists(segment.path()));
}

TEST_CASE("other files are not swept") {
  const std::vector<std::string> names = {"kvburst-notes", "kvburst-" + std::string(33, '0'),
                                          "other-" + std::string(32, '0')};
  for (const std::string& name : names) std::ofstream(path_of(name)) << "kept";
  BoardSegment::sweep();
  for (const std::string& name : names) {
    CHECK(std::filesystem::exists(path_of(name)));
    std::filesystem::remove(path_of(name));
  }
}
