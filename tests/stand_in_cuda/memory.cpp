#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <new>

namespace stand_in {
namespace {

/// As cuMemAlloc aligns.
constexpr std::size_t kAlignment = 512;
/// Of memory whose contents mean nothing yet, or nothing any more.
constexpr int kJunk = 0xA5;
/// No process on Linux has memory up here (47 bits of address), so an alias is never dereferenced.
constexpr std::uintptr_t kFirstAlias = std::uintptr_t{1} << 52;

std::size_t rounded_up(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

/// A part of the arena; gives its whole pages back.
class ArenaBlock : public Block {
 public:
  using Block::Block;
  ~ArenaBlock() override {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::uintptr_t first = rounded_up(begin, page);
    const std::uintptr_t last = end() / page * page;
    if (first < last) {
      madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
    }
  }
};

/// Memory of the process's heap.
class HeapBlock : public Block {
 public:
  using Block::Block;
  ~HeapBlock() override {
    operator delete(reinterpret_cast<void*>(begin), std::align_val_t{kAlignment});
  }
};

}  // namespace

Memory::~Memory() {
  blocks_.clear();
  aliases_.clear();
  if (arena_ != 0) munmap(reinterpret_cast<void*>(arena_), arena_bytes_);
}

std::shared_ptr<Block> Memory::add(std::shared_ptr<Block> block) {
  blocks_.emplace(block->begin, block);
  if (block->alias != 0) aliases_.emplace(block->alias, block);
  return block;
}

std::shared_ptr<Block> Memory::allocate(std::size_t bytes, std::uintptr_t context,
                                        std::size_t capacity) {
  if (arena_ == 0) {
    // Address space without memory: room for allocations that come and go, since no address is
    // given out twice.
    arena_bytes_ = 4 * capacity;
    void* arena =
        mmap(nullptr, arena_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (arena == MAP_FAILED) return nullptr;
    arena_ = reinterpret_cast<std::uintptr_t>(arena);
  }
  if (bytes > capacity - device_bytes_) return nullptr;
  const std::size_t end = rounded_up(arena_used_ + bytes, kAlignment);
  if (end > arena_bytes_) return nullptr;
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::uintptr_t first_page = (arena_ + arena_used_) / page * page;
  if (mprotect(reinterpret_cast<void*>(first_page), arena_ + end - first_page,
               PROT_READ | PROT_WRITE) != 0) {
    return nullptr;
  }
  auto block = std::make_shared<ArenaBlock>(Kind::device, arena_ + arena_used_, bytes, context);
  arena_used_ = end;
  std::memset(reinterpret_cast<void*>(block->begin), kJunk, bytes);
  device_bytes_ += bytes;
  return add(std::move(block));
}

std::shared_ptr<Block> Memory::allocate_host(std::size_t bytes, std::uintptr_t context) {
  void* memory = operator new(bytes, std::align_val_t{kAlignment}, std::nothrow);
  if (memory == nullptr) return nullptr;
  std::memset(memory, kJunk, bytes);
  return add(std::make_shared<HeapBlock>(Kind::allocated, reinterpret_cast<std::uintptr_t>(memory),
                                         bytes, context));
}

std::shared_ptr<Block> Memory::register_host(std::uintptr_t begin, std::size_t bytes,
                                             std::uintptr_t context, bool aliased) {
  if (touches(begin, bytes)) return nullptr;
  auto block = std::make_shared<Block>(Kind::registered, begin, bytes, context);
  if (aliased) {
    if (next_alias_ == 0) next_alias_ = kFirstAlias;
    block->alias = next_alias_;
    next_alias_ += rounded_up(bytes, kAlignment);
  }
  return add(std::move(block));
}

std::shared_ptr<Block> Memory::adopt(std::uintptr_t begin, std::size_t bytes,
                                     std::uintptr_t context) {
  if (touches(begin, bytes)) return nullptr;
  auto block = std::make_shared<Block>(Kind::device, begin, bytes, context);
  block->adopted = true;
  return add(std::move(block));
}

void Memory::forget(const Block& block) {
  if (block.on_device() && !block.adopted) device_bytes_ -= block.bytes;
  if (block.alias != 0) aliases_.erase(block.alias);
  const std::uintptr_t begin = block.begin;
  blocks_.erase(begin);
}

std::shared_ptr<Block> Memory::beginning_at(std::uintptr_t address) const {
  const auto found = blocks_.find(address);
  return found == blocks_.end() ? nullptr : found->second;
}

std::shared_ptr<Block> Memory::holding(std::uintptr_t address) const {
  if (auto next = blocks_.upper_bound(address); next != blocks_.begin()) {
    --next;
    if (address < next->second->end()) return next->second;
  }
  if (auto next = aliases_.upper_bound(address); next != aliases_.begin()) {
    --next;
    if (address - next->first < next->second->bytes) return next->second;
  }
  return nullptr;
}

bool Memory::touches(std::uintptr_t begin, std::size_t bytes) const {
  const auto next = blocks_.lower_bound(begin + bytes);
  return next != blocks_.begin() && std::prev(next)->second->end() > begin;
}

std::optional<Operand> Memory::operand(std::uintptr_t address, std::size_t bytes) const {
  std::shared_ptr<Block> block = holding(address);
  if (!block) {
    if (address == 0 || address + bytes < address || touches(address, bytes)) return std::nullopt;
    if (address >= kFirstAlias) return std::nullopt;
    return Operand{address, nullptr};
  }
  const bool by_alias = address < block->begin || address >= block->end();
  const std::uintptr_t real = by_alias ? address - block->alias + block->begin : address;
  if (bytes > block->end() - real) return std::nullopt;
  return Operand{real, std::move(block), by_alias};
}

}  // namespace stand_in
