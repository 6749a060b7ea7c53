#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "agreement/process_identity.h"
#include "agreement/step_board.h"

/// The memory that the ranks of one node share for a board: a file in /dev/shm, mapped.
///
/// Rank 0 creates it under a random name and hands name and nonce to the others, which attach; once
/// all have, the name is removed, and the kernel frees the memory with the last process. A rank
/// holds a lock on a byte of the file, its rank's, that the kernel drops when the process ends,
/// however it does. So a file without a lock belongs to nobody: ranks were killed before its name
/// was removed, and `sweep` removes it.
namespace kvburst {

class BoardSegment final : public BoardPeers {
 public:
  /// Creates a segment and attaches as rank 0. Throws BoardError, naming the call that failed and
  /// why, and BoardUseError on a shape out of bounds.
  static std::shared_ptr<BoardSegment> create(const BoardShape& shape);
  /// Attaches to the segment of that name. Throws BoardError where it is not there, belongs to
  /// somebody else, may be opened by others, has another size, nonce or shape than was said, or
  /// the rank is attached already; BoardUseError on a shape or rank out of bounds, or a name that
  /// no segment can have.
  static std::shared_ptr<BoardSegment> attach(const std::string& name, std::uint64_t nonce,
                                              const BoardShape& shape, int rank);
  /// Removes what ranks of this user that have all ended left in /dev/shm; returns how many files.
  /// What cannot be looked at is left alone.
  static int sweep();

  BoardSegment(const BoardSegment&) = delete;
  BoardSegment& operator=(const BoardSegment&) = delete;
  ~BoardSegment() override;

  const std::string& name() const { return name_; }
  /// From 0 to 2^63 - 1; says that a segment is the one that was meant.
  std::uint64_t nonce() const { return nonce_; }
  /// The board's memory, zeroed, `shape.bytes()` of it.
  std::byte* memory() const;

  /// Removes the name. Who has attached stays so. Idempotent; any rank may.
  void unlink();
  /// Unmaps the memory and drops the lock. Idempotent; the destructor does it too.
  void leave();

  // Of a rank that never attached nobody can tell whether it has ended.
  bool ended(int rank) const override;
  std::string process(int rank) const override;

 private:
  struct Header;
  struct Occupant;

  BoardSegment(std::string name, int file, std::uint64_t nonce, const BoardShape& shape, int rank);
  static std::size_t bytes(const BoardShape& shape);
  void map();
  bool try_lock();
  void move_in();
  void check_file() const;
  void check_header() const;
  Header& header() const;
  Occupant& occupant(int rank) const;

  std::string name_;
  int file_;
  std::uint64_t nonce_;
  BoardShape shape_;
  int rank_;
  std::byte* mapping_ = nullptr;
};

}  // namespace kvburst
