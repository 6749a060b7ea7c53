#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>

namespace stand_in {

enum class Kind : std::uint8_t {
  device,      ///< of cuMemAlloc, or adopted from the test
  allocated,   ///< pinned, of cuMemHostAlloc
  registered,  ///< pinned, of cuMemHostRegister
};

/// One allocation or registration. Operations on it hold it until they are done, so that memory
/// freed too early is still there when they reach it.
class Block {
 public:
  Block(Kind kind, std::uintptr_t begin, std::size_t bytes, std::uintptr_t context)
      : kind(kind), begin(begin), bytes(bytes), context(context) {}
  virtual ~Block() = default;
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  bool on_device() const { return kind == Kind::device; }
  std::uintptr_t end() const { return begin + bytes; }

  const Kind kind;
  const std::uintptr_t begin;
  const std::size_t bytes;
  const std::uintptr_t context;  ///< the handle of its context
  bool adopted = false;
  std::uintptr_t alias = 0;  ///< the address by which the device knows it; 0: its own
};

/// Where the bytes of an operand are.
struct Operand {
  std::uintptr_t address;        ///< an alias resolved
  std::shared_ptr<Block> block;  ///< null: pageable host memory
  bool by_alias = false;

  bool on_device() const { return block && block->on_device(); }
  bool pinned() const { return block && !block->on_device(); }
};

/// The memory that the driver knows: real memory, at addresses the process can use. Device
/// allocations lie side by side, so that one byte too many is in somebody else's, and no address is
/// used twice.
class Memory {
 public:
  ~Memory();

  /// Null if there is no room for it under `capacity`.
  std::shared_ptr<Block> allocate(std::size_t bytes, std::uintptr_t context, std::size_t capacity);
  std::shared_ptr<Block> allocate_host(std::size_t bytes, std::uintptr_t context);
  /// Null if a byte of it is known already.
  std::shared_ptr<Block> register_host(std::uintptr_t begin, std::size_t bytes,
                                       std::uintptr_t context, bool aliased);
  /// Memory of the test, to be taken for device memory. Null if a byte of it is known already.
  std::shared_ptr<Block> adopt(std::uintptr_t begin, std::size_t bytes, std::uintptr_t context);
  void forget(const Block& block);

  /// The block that begins there; null if none does.
  std::shared_ptr<Block> beginning_at(std::uintptr_t address) const;
  /// The block with that byte, by its address or alias; null if none has it.
  std::shared_ptr<Block> holding(std::uintptr_t address) const;
  /// Nothing if some bytes belong to a block and others do not, or not to the same.
  std::optional<Operand> operand(std::uintptr_t address, std::size_t bytes) const;

  const std::map<std::uintptr_t, std::shared_ptr<Block>>& blocks() const { return blocks_; }
  std::size_t device_bytes() const { return device_bytes_; }

 private:
  bool touches(std::uintptr_t begin, std::size_t bytes) const;
  std::shared_ptr<Block> add(std::shared_ptr<Block> block);

  std::map<std::uintptr_t, std::shared_ptr<Block>> blocks_;   // by their first address
  std::map<std::uintptr_t, std::shared_ptr<Block>> aliases_;  // by the first address of the alias
  std::uintptr_t arena_ = 0;
  std::size_t arena_bytes_ = 0;
  std::size_t arena_used_ = 0;
  std::uintptr_t next_alias_ = 0;
  std::size_t device_bytes_ = 0;
};

}  // namespace stand_in
