#include <fuzzer/FuzzedDataProvider.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>
#include <vector>

#include "core/burst_pages.h"
#include "core/copy_plan.h"
#include "core/error.h"
#include "plan_checks.h"
#include "pools.h"

/// Bytes become pools, limits, options and the index tensors of a burst. What is collected from the
/// tensors is compared with the pages they were made of, and what the plan moves with the naive
/// copy; AddressSanitizer watches both. Everything is valid by construction, so that a refusal is a
/// failure too, except for the one bad index that a refused call is made with.

using namespace kvburst;
using namespace kvburst::testing;

namespace {

void require(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what.c_str());
  std::abort();
}

template <class Integer>
Integer from_to(FuzzedDataProvider& in, Integer least, Integer most) {
  return in.ConsumeIntegralInRange<Integer>(least, most);
}

/// Layers in rising or falling order, with gaps, cut into allocations anywhere.
void place_on_device(FuzzedDataProvider& in, PoolShape& shape) {
  const std::size_t count = shape.layer_ids.size();
  const bool even = in.ConsumeBool();
  std::size_t begin = 0;
  std::size_t at = 0;
  shape.layer_offsets.clear();
  shape.allocations.clear();
  for (std::size_t i = 0; i < count; ++i) {
    if (!even) at += from_to<std::size_t>(in, 0, 9);
    shape.layer_offsets.push_back(at);
    at += shape.layer_bytes();
    if (i + 1 == count || (!even && from_to(in, 0, 3) == 0)) {
      shape.allocations.push_back({begin, at - begin});
      begin = at;
    }
  }
  if (from_to(in, 0, 7) == 0) {
    std::reverse(shape.layer_offsets.begin(), shape.layer_offsets.end());
  }
}

/// Rows in order or not, with holes; page first or layer first, packed or not.
void place_on_host(FuzzedDataProvider& in, PoolShape& shape) {
  const std::size_t count = shape.layer_ids.size();
  std::vector<std::int64_t> rows;
  for (std::size_t row = 0; row < count; ++row) rows.push_back(static_cast<std::int64_t>(row));
  if (from_to(in, 0, 3) == 0) {
    for (std::size_t i = count; i > 1; --i) {
      std::swap(rows[i - 1], rows[from_to<std::size_t>(in, 0, i - 1)]);
    }
  }
  const std::int64_t spread = from_to<std::int64_t>(in, 1, 2);
  std::int64_t last_row = 0;
  for (std::size_t i = 0; i < count; ++i) {
    shape.rows[i].reset();
    if (from_to(in, 0, 7) == 0) continue;
    shape.rows[i] = spread * rows[i];
    last_row = std::max(last_row, *shape.rows[i]);
  }
  const auto pages = static_cast<std::size_t>(shape.host_pages);
  const auto stored = static_cast<std::size_t>(last_row);
  const std::size_t slack = in.ConsumeBool() ? from_to<std::size_t>(in, 0, 9) : 0;
  if (in.ConsumeBool()) {
    shape.layer_stride = shape.page_bytes + (in.ConsumeBool() ? slack : 0);
    shape.page_stride = stored * shape.layer_stride + shape.page_bytes + slack;
  } else {
    shape.page_stride = shape.page_bytes + (in.ConsumeBool() ? slack : 0);
    shape.layer_stride = (pages - 1) * shape.page_stride + shape.page_bytes + slack;
  }
  if (in.ConsumeBool()) {
    // The first registration holds a page; the rest may be of any size.
    std::size_t bytes = shape.page_bytes + from_to<std::size_t>(in, 0, 99);
    for (std::size_t at = 0; at < shape.host_bytes(); at = shape.registrations.back().end()) {
      shape.registrations.push_back({at, std::min(bytes, shape.host_bytes() - at)});
      bytes = from_to<std::size_t>(in, 1, 200);
    }
  }
}

PoolShape shape_from(FuzzedDataProvider& in) {
  std::vector<int> ids;
  int id = -1;
  for (int layers = from_to(in, 1, 9); layers > 0; --layers) {
    id += from_to(in, 0, 5) == 0 ? from_to(in, 1, 3) : 1;
    ids.push_back(id);
  }
  PoolShape shape = page_first("pool", ids, from_to<std::size_t>(in, 1, 40),
                               from_to<std::int64_t>(in, 1, 16), from_to<std::int64_t>(in, 1, 16));
  place_on_device(in, shape);
  place_on_host(in, shape);
  return shape;
}

/// Pairs whose destinations are new to `used`; often neighbours of each other. At most `count`.
std::vector<PagePair> pairs_from(FuzzedDataProvider& in, Direction direction, std::int64_t count,
                                 std::int64_t device_pages, std::int64_t host_pages,
                                 std::set<std::int64_t>& used) {
  std::vector<PagePair> pairs;
  PagePair next{0, 0};
  for (std::int64_t i = 0; i < count; ++i) {
    if (from_to(in, 0, 3) == 0) {
      next = {from_to<std::int64_t>(in, 0, device_pages - 1),
              from_to<std::int64_t>(in, 0, host_pages - 1)};
    }
    if (next.device >= device_pages || next.host >= host_pages) break;
    if (!used.insert(direction == Direction::load ? next.device : next.host).second) break;
    pairs.push_back(next);
    ++next.device;
    ++next.host;
  }
  return pairs;
}

/// An index tensor of one side of some pairs: int32 or int64, packed, spread or backwards.
class Tensor {
 public:
  Tensor(FuzzedDataProvider& in, const std::vector<PagePair>& pairs, bool device,
         std::int64_t page_size)
      : wide_(in.ConsumeBool()), stride_(from_to<std::int64_t>(in, -2, 2)) {
    if (stride_ == 0) stride_ = 1;
    std::vector<std::int64_t> pages;
    for (const PagePair& pair : pairs) pages.push_back(device ? pair.device : pair.host);
    const std::vector<std::int64_t> slots = slots_of(pages, page_size);
    count_ = std::ssize(slots);
    const auto step = static_cast<std::size_t>(std::abs(stride_));
    const std::size_t size = slots.empty() ? 0 : (slots.size() - 1) * step + 1;
    wide_values_.assign(wide_ ? size : 0, -1);
    narrow_.assign(wide_ ? 0 : size, -1);
    for (std::size_t i = 0; i < slots.size(); ++i) {
      const std::size_t at = stride_ > 0 ? i * step : size - 1 - i * step;
      if (wide_) {
        wide_values_[at] = slots[i];
      } else {
        narrow_[at] = static_cast<std::int32_t>(slots[i]);
      }
    }
  }

  IndexView view() const {
    const std::size_t last = std::max(wide_values_.size(), narrow_.size());
    const std::size_t first = stride_ > 0 || last == 0 ? 0 : last - 1;
    const void* data = wide_ ? static_cast<const void*>(wide_values_.data() + first)
                             : static_cast<const void*>(narrow_.data() + first);
    return {"indices", data, count_, stride_, wide_ ? 8 : 4};
  }

 private:
  bool wide_;
  std::int64_t stride_;
  std::int64_t count_ = 0;
  std::vector<std::int64_t> wide_values_;
  std::vector<std::int32_t> narrow_;
};

/// Appends the pages of a few calls, and one call that is refused, to a collection; checks what it
/// then holds.
PageLists collect(FuzzedDataProvider& in, const std::vector<Pool>& pools, Direction direction) {
  const std::vector<PoolLayout> layouts = layouts_of(pools);
  const std::int64_t page_size = from_to<std::int64_t>(in, 1, 3);
  BurstPages collected(layouts, direction, page_size,
                       in.ConsumeBool() ? IndexCheck::slots : IndexCheck::pages);
  std::int64_t device_pages = 16;
  std::int64_t host_pages = 16;
  for (const PoolLayout& layout : layouts) {
    device_pages = std::min(device_pages, layout.device_pages());
    host_pages = std::min(host_pages, layout.host_pages());
  }
  std::vector<std::set<std::int64_t>> used(pools.size());
  std::vector<std::vector<PagePair>> expected(pools.size());
  for (int calls = from_to(in, 1, 3); calls > 0; --calls) {
    // A page that any pool has as its destination is out of bounds for the list they share.
    std::set<std::int64_t> taken;
    for (const auto& set : used) taken.insert(set.begin(), set.end());
    const std::vector<PagePair> common = pairs_from(in, direction, from_to<std::int64_t>(in, 0, 12),
                                                    device_pages, host_pages, taken);
    const auto count = std::ssize(common);
    std::vector<std::vector<PagePair>> own_pairs(pools.size(), common);
    std::vector<Tensor> tensors;
    tensors.reserve(2 * pools.size());
    std::vector<BurstPages::Own> own;
    for (std::size_t p = 0; p < pools.size(); ++p) {
      std::set<std::int64_t> mine = used[p];
      if (p > 0 && from_to(in, 0, 2) == 0) {
        const auto pairs = pairs_from(in, direction, count, layouts[p].device_pages(),
                                      layouts[p].host_pages(), mine);
        if (std::ssize(pairs) == count) {
          own_pairs[p] = pairs;
          tensors.emplace_back(in, pairs, true, page_size);
          tensors.emplace_back(in, pairs, false, page_size);
          own.push_back({p, tensors[tensors.size() - 2].view(), tensors.back().view()});
        }
      }
    }
    const Tensor device(in, common, true, page_size);
    const Tensor host(in, common, false, page_size);
    if (count > 0 && in.ConsumeBool()) {
      std::vector<PagePair> spoilt = common;
      spoilt[from_to<std::size_t>(in, 0, spoilt.size() - 1)].device = in.ConsumeBool() ? -1 : 1000;
      const Tensor bad(in, spoilt, true, page_size);
      bool refused = false;
      try {
        collected.append(bad.view(), host.view(), own);
      } catch (const PageError&) {
        refused = true;
      }
      require(refused, "an index out of range was not refused");
    }
    require(collected.append(device.view(), host.view(), own) == count, "pages appended");
    for (std::size_t p = 0; p < pools.size(); ++p) {
      for (const PagePair& pair : own_pairs[p]) {
        used[p].insert(direction == Direction::load ? pair.device : pair.host);
        expected[p].push_back(pair);
      }
    }
  }
  for (std::size_t p = 0; p < pools.size(); ++p) {
    const auto pairs = collected.lists().of_pool(p);
    require(std::equal(pairs.begin(), pairs.end(), expected[p].begin(), expected[p].end()),
            "collected pages differ from those of the tensors");
  }
  return collected.take({});
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  FuzzedDataProvider in(data, size);
  const Direction direction = in.ConsumeBool() ? Direction::load : Direction::backup;
  std::vector<Pool> pools;
  for (int count = from_to(in, 1, 3); count > 0; --count) {
    pools.emplace_back(shape_from(in), static_cast<unsigned>(count));
  }
  const CopyLimits limits{
      .max_pitch = in.ConsumeBool() ? std::size_t{2'147'483'647} : from_to<std::size_t>(in, 1, 700),
      .copies_per_call = from_to<std::size_t>(in, 1, 40),
      .tall_copies = from_to(in, 0, 7) > 0};
  const PlanOptions options{.max_group = from_to(in, 1, 16),
                            .ramp = from_to(in, 0, 3) > 0,
                            .merge_neighbours = from_to(in, 0, 3) > 0,
                            .chunk_pages = from_to<std::int64_t>(in, 0, 9)};
  const CopyPlanner planner(layouts_of(pools), direction, limits, options);
  const PlanOutcome outcome = carry_out(pools, planner, options, collect(in, pools, direction));
  require(outcome.fault.empty(), outcome.fault);
  return 0;
}
