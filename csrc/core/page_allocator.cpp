#include "core/page_allocator.h"

#include <utility>

#include "core/error.h"
#include "core/format.h"

namespace kvburst {
namespace {

std::int64_t page_of(const PagePair& pair, Tier tier) {
  return tier == Tier::device ? pair.device : pair.host;
}

std::size_t at(std::int64_t page) { return static_cast<std::size_t>(page); }

}  // namespace

PageAllocator::PageAllocator(std::string name, std::int64_t pages, std::int64_t page_size,
                             FreeOrder order)
    : name_(std::move(name)), page_size_(page_size), order_(order) {
  if (pages < 1) throw LayoutError(text(name_, ": pages: ", pages, " is below the minimum of 1"));
  if (page_size < 1) {
    throw LayoutError(text(name_, ": page_size: ", page_size, " is below the minimum of 1"));
  }
  state_.resize(at(pages));
  holds_.resize(at(pages));
  reset();
}

bool PageAllocator::allocate(std::int64_t slots, std::int64_t* out) {
  if (slots < 0 || slots % page_size_ != 0) {
    throw PageError(text(name_, ": ", slots, " slots is not a multiple of page_size ", page_size_));
  }
  const std::int64_t pages = slots / page_size_;
  if (pages > available_pages()) return false;
  for (std::int64_t i = 0; i < pages; ++i) {
    const std::int64_t page = free_.front();
    free_.pop_front();
    state_[at(page)] = State::used;
    for (std::int64_t slot = 0; slot < page_size_; ++slot) *out++ = page * page_size_ + slot;
  }
  return true;
}

void PageAllocator::take_back(std::int64_t slots, const std::int64_t* in) {
  for (std::int64_t first = slots - page_size_; first >= 0; first -= page_size_) {
    const std::int64_t page = in[first] / page_size_;
    state_[at(page)] = State::free;
    free_.push_front(page);
  }
}

void PageAllocator::free(const IndexView& slots) {
  check_shape(slots, page_size_);
  scratch_.clear();
  try {
    for (std::int64_t first = 0; first < slots.count; first += page_size_) {
      const std::int64_t page = page_at(slots, first, page_size_, pages(), IndexCheck::slots);
      State& state = state_[at(page)];
      if (state != State::used) {
        throw PageError(text(name_, ": ", slots.name, "[", first, "]: page ", page,
                             " is not allocated, it was never handed out or has been freed"));
      }
      state = State::freed_while_held;
      scratch_.push_back(page);
    }
  } catch (const PageError&) {
    for (const std::int64_t page : scratch_) state_[at(page)] = State::used;
    throw;
  }
  give_back(scratch_);
}

/// Moves those of `pages`, freed by their owner, that no burst holds to the free list.
void PageAllocator::give_back(const std::vector<std::int64_t>& pages) {
  const auto put = [&](std::int64_t page) {
    if (holds_[at(page)] > 0) return;
    state_[at(page)] = State::free;
    if (order_ == FreeOrder::lifo) {
      free_.push_front(page);
    } else {
      free_.push_back(page);
    }
  };
  if (order_ == FreeOrder::lifo) {  // a batch keeps its order at the front
    for (auto page = pages.rbegin(); page != pages.rend(); ++page) put(*page);
  } else {
    for (const std::int64_t page : pages) put(page);
  }
}

std::int64_t PageAllocator::hold(std::span<const PagePair> pairs, Tier tier) {
  for (const PagePair& pair : pairs) {
    const std::int64_t page = page_of(pair, tier);
    if (page == kDeferred) continue;
    if (page < 0 || page >= pages() || state_[at(page)] != State::used) {
      throw PageError(text(name_, ": page ", page, " is not allocated, a burst cannot use it"));
    }
  }
  for (const PagePair& pair : pairs) {
    if (const std::int64_t page = page_of(pair, tier); page != kDeferred) ++holds_[at(page)];
  }
  return resets_;
}

void PageAllocator::release(std::span<const PagePair> pairs, Tier tier, std::int64_t reset) {
  if (reset != resets_) return;
  scratch_.clear();
  for (const PagePair& pair : pairs) {
    const std::int64_t page = page_of(pair, tier);
    if (page == kDeferred) continue;
    if (page < 0 || page >= pages() || holds_[at(page)] == 0) {
      throw PageError(text(name_, ": page ", page, " is not held, it cannot be released"));
    }
    if (--holds_[at(page)] == 0 && state_[at(page)] == State::freed_while_held) {
      scratch_.push_back(page);
    }
  }
  give_back(scratch_);
}

void PageAllocator::reset() {
  ++resets_;
  free_.clear();
  for (std::int64_t page = 0; page < pages(); ++page) {
    free_.push_back(page);
    state_[at(page)] = State::free;
    holds_[at(page)] = 0;
  }
}

}  // namespace kvburst
