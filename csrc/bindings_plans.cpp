#include <algorithm>
#include <optional>
#include <string>
#include <tuple>

#include "bindings.h"
#include "core/burst.h"
#include "core/copy_plan.h"
#include "core/page_allocator.h"

namespace kvburst::bindings {
namespace {

using AddressAndSize = std::pair<std::uintptr_t, std::size_t>;
using CopyTuple =
    std::tuple<std::uintptr_t, std::uintptr_t, std::size_t, std::size_t, std::size_t, std::size_t>;

/// An index tensor's memory together with the name it goes by in messages.
struct BoundIndices {
  std::string name;
  IndexView view;

  IndexView named() const {
    IndexView result = view;
    result.name = name;
    return result;
  }
};

struct BoundGroup {
  int pool;
  std::vector<int> layers;
  std::vector<int> completes;
};

/// A plan, counted as it will be issued.
struct BoundPlan {
  std::shared_ptr<CopyPlanner> planner;
  CopyPlan plan;

  std::vector<std::vector<CopyTuple>> batches(std::size_t group, std::int64_t& splits) const {
    if (group >= planner->groups().size()) {
      throw LayoutError(text("group: ", group, " is out of range, the plan has ",
                             planner->groups().size(), " groups"));
    }
    std::vector<std::vector<CopyTuple>> batches;
    std::vector<Copy> batch;
    planner->emit(
        plan, group, batch,
        [&](std::span<const Copy> copies) {
          batches.emplace_back();
          for (const Copy& c : copies) {
            batches.back().emplace_back(c.dst, c.src, c.width, c.height, c.dst_pitch, c.src_pitch);
          }
        },
        splits);
    return batches;
  }
};

std::vector<MemoryRange> ranges(const std::vector<AddressAndSize>& pairs) {
  std::vector<MemoryRange> out;
  for (const auto& [address, size] : pairs) out.push_back({address, size});
  return out;
}

std::span<const PagePair> collected_from(const BoundPages& pages, std::size_t first) {
  const std::span<const PagePair> all = pages.pages.lists().of_pool(0);
  if (first > all.size()) {
    throw PageError(text("first: ", first, " must be from 0 to the ", all.size(), " collected"));
  }
  return all.subspan(first);
}

BoundGroup bound_group(const CopyPlanner& planner, const LayerGroup& group) {
  BoundGroup bound{group.pool, {}, group.completes};
  const auto stored = planner.pools()[static_cast<std::size_t>(group.pool)].stored();
  for (int i = group.first; i < group.first + group.layers; ++i) {
    bound.layers.push_back(stored[static_cast<std::size_t>(i)].layer);
  }
  return bound;
}

BoundPlan make_plan(const std::shared_ptr<CopyPlanner>& planner, const BoundPages& pages) {
  BoundPlan bound{planner, {}};
  PageLists lists = pages.pages.lists();
  planner->plan(lists, bound.plan);
  std::vector<Copy> batch;
  for (std::size_t group = 0; group < planner->groups().size(); ++group) {
    const PoolLayout& pool =
        planner->pools()[static_cast<std::size_t>(planner->groups()[group].pool)];
    if (pool.registrations().size() < 2) continue;
    planner->emit(
        bound.plan, group, batch, [](std::span<const Copy>) {},
        bound.plan.count.registration_splits);
  }
  return bound;
}

std::int64_t append(BoundPages& self, const BoundIndices& device, const BoundIndices& host,
                    const std::vector<std::tuple<std::string, BoundIndices, BoundIndices>>& own) {
  std::vector<BurstPages::Own> parts;
  for (const auto& [name, own_device, own_host] : own) {
    const auto& names = self.pool_names;
    const auto found = std::find(names.begin(), names.end(), name);
    if (found == names.end()) {
      std::string known;
      for (const std::string& other : names) known += text(known.empty() ? "" : ", ", other);
      throw PageError(text("pool: '", name, "' is none of the pools, which are: ", known));
    }
    parts.push_back(
        {static_cast<std::size_t>(found - names.begin()), own_device.named(), own_host.named()});
  }
  return self.pages.append(device.named(), host.named(), parts);
}

void bind_layouts(py::module_& module) {
  py::class_<DeviceTier>(module, "DeviceTier", R"(The device side of a pool.

``layers``: address of page 0, one a layer; ``page_bytes``: bytes of one page of one layer, the pages
of a layer follow each other; ``allocations``: (address, bytes) of what the layers lie in. Describes
memory and keeps none alive.)")
      .def(py::init([](std::vector<std::uintptr_t> layers, std::int64_t pages,
                       std::int64_t page_bytes, const std::vector<AddressAndSize>& allocations) {
             return DeviceTier{std::move(layers), pages,
                               whole_number<std::size_t>("device page_bytes", page_bytes, 1),
                               ranges(allocations)};
           }),
           py::kw_only(), py::arg("layers"), py::arg("pages"), py::arg("page_bytes"),
           py::arg("allocations"));

  py::class_<HostTier>(module, "HostTier", R"(The host side of a pool.

Page p of row r lies at ``address + p * page_stride + r * layer_stride``; ``size``: bytes of the
buffer; ``page_bytes``: bytes it has for one page of one layer; ``rows``: the row of each device
layer, None where the host does not store it; ``registrations``: (address, bytes) of the pinned
ranges, none for memory that is not pinned. Describes memory and keeps none alive.)")
      .def(py::init([](std::uintptr_t address, std::int64_t size, std::int64_t pages,
                       std::int64_t page_bytes, std::int64_t page_stride, std::int64_t layer_stride,
                       std::vector<std::optional<std::int64_t>> rows,
                       const std::vector<AddressAndSize>& registrations) {
             return HostTier{address,
                             whole_number<std::size_t>("host size", size, 0),
                             pages,
                             whole_number<std::size_t>("host page_bytes", page_bytes, 0),
                             whole_number<std::size_t>("page_stride", page_stride, 0),
                             whole_number<std::size_t>("layer_stride", layer_stride, 0),
                             std::move(rows),
                             ranges(registrations)};
           }),
           py::kw_only(), py::arg("address"), py::arg("size"), py::arg("pages"),
           py::arg("page_bytes"), py::arg("page_stride"), py::arg("layer_stride"), py::arg("rows"),
           py::arg("registrations") = std::vector<AddressAndSize>{});

  const auto stored_at = [](const PoolLayout& self, int layer, std::int64_t page,
                            std::int64_t pages) -> const StoredLayer& {
    if (page < 0 || page >= pages) {
      throw PageError(text("page: ", page, " is out of range, the tier has ", pages, " pages"));
    }
    for (const StoredLayer& stored : self.stored()) {
      if (stored.layer == layer) return stored;
    }
    throw LayoutError(text("layer: ", layer, " is not stored by pool '", self.name(), "'"));
  };
  py::class_<PoolLayout>(module, "PoolLayout", R"(Where a (layer, page) of one pool lives.

Checked at construction, immutable after it. Raises LayoutError, naming both values.)")
      .def(py::init([](std::string name, const std::vector<int>& layer_ids, DeviceTier device,
                       HostTier host) {
             return PoolLayout(std::move(name), layer_ids, std::move(device), std::move(host));
           }),
           py::kw_only(), py::arg("name"), py::arg("layer_ids"), py::arg("device"), py::arg("host"))
      .def_property_readonly("name", &PoolLayout::name)
      .def_property_readonly("page_bytes", &PoolLayout::page_bytes)
      .def_property_readonly("device_pages", &PoolLayout::device_pages)
      .def_property_readonly("host_pages", &PoolLayout::host_pages)
      .def_property_readonly("stored_layers",
                             [](const PoolLayout& self) {
                               std::vector<int> layers;
                               for (const StoredLayer& stored : self.stored()) {
                                 layers.push_back(stored.layer);
                               }
                               return layers;
                             })
      .def_property_readonly("num_layers", &PoolLayout::num_layers)
      .def(
          "device_address",
          [=](const PoolLayout& self, int layer, std::int64_t page) {
            return self.device_address(stored_at(self, layer, page, self.device_pages()), page);
          },
          py::arg("layer"), py::arg("page"))
      .def(
          "host_address",
          [=](const PoolLayout& self, int layer, std::int64_t page) {
            return self.host_address(stored_at(self, layer, page, self.host_pages()), page);
          },
          py::arg("layer"), py::arg("page"));
}

void bind_pages(py::module_& module) {
  py::class_<BoundIndices>(module, "IndexView", R"(An index tensor in host memory, in token slots.

``count`` slots, ``stride`` elements apart, of ``itemsize`` bytes (4: int32, 8: int64). ``name`` is
what messages call it. Read while a call that takes it runs, and not after.)")
      .def(py::init([](std::string name, std::uintptr_t address, std::int64_t count,
                       std::int64_t stride, int itemsize) {
             return BoundIndices{
                 std::move(name),
                 {{}, reinterpret_cast<const void*>(address), count, stride, itemsize}};
           }),
           py::kw_only(), py::arg("name"), py::arg("address"), py::arg("count"), py::arg("stride"),
           py::arg("itemsize"));

  py::class_<BoundPages>(module, "BurstPages", R"(Collects the pages of one burst, and checks them.

``page_size`` in slots. ``check="slots"`` reads every index, ``"pages"`` the first of each page. Of
one thread: the one that submits.)")
      .def(py::init([](const std::vector<PoolLayout>& layouts, const std::string& direction,
                       std::int64_t page_size, const std::string& check) {
             if (check != "pages" && check != "slots") {
               throw LayoutError(text("check: '", check, "' must be 'pages' or 'slots'"));
             }
             std::vector<std::string> names;
             for (const PoolLayout& layout : layouts) names.push_back(layout.name());
             return BoundPages{BurstPages(layouts, direction_of(direction), page_size,
                                          check == "slots" ? IndexCheck::slots : IndexCheck::pages),
                               std::move(names)};
           }),
           py::arg("layouts"), py::kw_only(), py::arg("direction"), py::arg("page_size"),
           py::arg("check") = "pages")
      .def("append", &append, py::kw_only(), py::arg("device"), py::arg("host"),
           py::arg("own") = std::vector<std::tuple<std::string, BoundIndices, BoundIndices>>{},
           R"(Adds whole pages, given by their slots, and returns how many.

``own``: (pool, device, host) of pools that move other pages, as many. Page ids are copied. Raises
PageError and leaves the collection as it was.)")
      .def(
          "append_deferred",
          [](BoundPages& self, const BoundIndices& device, const BoundIndices& host) {
            return self.pages.append_deferred(device.named(), host.named());
          },
          py::kw_only(), py::arg("device"), py::arg("host"),
          R"(The same with device indices that lie on the device.

The issuer reads them behind the work that is on the submitter's stream; their memory must stay until
the burst's ack is retired. Indices that turn out bad fail the burst.)")
      .def(
          "truncate", [](BoundPages& self, std::int64_t pages) { self.pages.truncate(pages); },
          py::arg("pages"), "Drops all but the first `pages` pages.")
      .def_property_readonly("num_pages",
                             [](const BoundPages& self) { return self.pages.num_pages(); })
      .def(
          "pairs",
          [](const BoundPages& self, std::size_t pool) {
            if (pool >= self.pages.num_pools()) {
              throw PageError(text("pool: ", pool, " is out of range, there are ",
                                   self.pages.num_pools(), " pools"));
            }
            std::vector<std::pair<std::int64_t, std::int64_t>> out;
            for (const PagePair& pair : self.pages.lists().of_pool(pool)) {
              out.emplace_back(pair.device, pair.host);
            }
            return out;
          },
          py::arg("pool") = 0, "(device page, host page) of each page of a pool.");

  py::class_<PageAllocator>(module, "PageAllocator", R"(Hands out the pages of one tier.

``order``: freed pages join the free list at its front ("lifo", SGLang's device tier) or its end
("fifo", its host tier). Pages that a burst holds may be freed, but are not handed out again before
it lets go. Of one thread.)")
      .def(py::init([](std::string name, std::int64_t pages, std::int64_t page_size,
                       const std::string& order) {
             if (order != "lifo" && order != "fifo") {
               throw LayoutError(text("order: '", order, "' must be 'lifo' or 'fifo'"));
             }
             return PageAllocator(std::move(name), pages, page_size,
                                  order == "lifo" ? FreeOrder::lifo : FreeOrder::fifo);
           }),
           py::kw_only(), py::arg("name"), py::arg("pages"), py::arg("page_size"), py::arg("order"))
      .def_property_readonly("name", &PageAllocator::name)
      .def_property_readonly("pages", &PageAllocator::pages)
      .def_property_readonly("page_size", &PageAllocator::page_size)
      .def_property_readonly("available_pages", &PageAllocator::available_pages)
      .def(
          "allocate",
          [](PageAllocator& self, std::int64_t slots, std::uintptr_t out) {
            return self.allocate(slots, reinterpret_cast<std::int64_t*>(out));
          },
          py::arg("slots"), py::arg("out"),
          "Writes `slots` int64 slot indices to address `out`; False if there are not as many.")
      .def(
          "take_back",
          [](PageAllocator& self, std::int64_t slots, std::uintptr_t from) {
            self.take_back(slots, reinterpret_cast<const std::int64_t*>(from));
          },
          py::arg("slots"), py::arg("from_address"),
          "Undoes the last `allocate`, of which nothing has come.")
      .def(
          "free_slots",
          [](PageAllocator& self, const BoundIndices& slots) { self.free(slots.named()); },
          py::arg("slots"), "Takes back whole pages, all or none.")
      .def(
          "hold",
          [](PageAllocator& self, const BoundPages& pages, const std::string& tier,
             std::size_t first) { return self.hold(collected_from(pages, first), tier_of(tier)); },
          py::arg("pages"), py::kw_only(), py::arg("tier"), py::arg("first"),
          "Keeps the pages collected from position `first` on; returns the reset they belong to.")
      .def(
          "release",
          [](PageAllocator& self, const BoundPages& pages, const std::string& tier,
             std::int64_t reset, std::size_t first) {
            self.release(collected_from(pages, first), tier_of(tier), reset);
          },
          py::arg("pages"), py::kw_only(), py::arg("tier"), py::arg("reset"), py::arg("first"))
      .def(
          "release",
          [](PageAllocator& self, const Burst& burst, const std::string& tier, std::int64_t reset) {
            self.release(burst.pages.of_pool(0), tier_of(tier), reset);
          },
          py::arg("pages"), py::kw_only(), py::arg("tier"), py::arg("reset"),
          "Lets go of the pages of a burst; of no effect if the allocator has been reset since.")
      .def("reset", &PageAllocator::reset, "Everything is free again; drain the bursts first.");
}

void bind_planner(py::module_& module) {
  py::class_<PlanOptions>(module, "PlanOptions", R"(How a burst is cut into copies.

``max_group``: most layers in one group of a load; ``ramp``: groups grow 1, 2, 4, ... up to it,
False gives one layer a group; ``merge_neighbours``: pages that are neighbours on both tiers move
together; ``chunk_pages``: most pages a backup hands over in one call, 0 is no bound.)")
      .def(py::init([](std::int64_t max_group, bool ramp, bool merge_neighbours,
                       std::int64_t chunk_pages) {
             return PlanOptions{whole_number<int>("max_group", max_group, 1), ramp,
                                merge_neighbours,
                                whole_number<std::int64_t>("chunk_pages", chunk_pages, 0)};
           }),
           py::kw_only(), py::arg("max_group") = PlanOptions{}.max_group,
           py::arg("ramp") = PlanOptions{}.ramp,
           py::arg("merge_neighbours") = PlanOptions{}.merge_neighbours,
           py::arg("chunk_pages") = PlanOptions{}.chunk_pages)
      .def_readonly("max_group", &PlanOptions::max_group)
      .def_readonly("ramp", &PlanOptions::ramp)
      .def_readonly("merge_neighbours", &PlanOptions::merge_neighbours)
      .def_readonly("chunk_pages", &PlanOptions::chunk_pages);

  py::class_<BoundGroup>(module, "LayerGroup", "Layers of one pool that are issued together.")
      .def_readonly("pool", &BoundGroup::pool)
      .def_readonly("layers", &BoundGroup::layers)
      .def_readonly("completes", &BoundGroup::completes,
                    "Layers of which, once it is issued, every pool's part is.");

  py::class_<BoundPlan>(module, "CopyPlan", "The copies of one burst.")
      .def_property_readonly("num_copies",
                             [](const BoundPlan& self) {
                               return self.plan.count.copies + self.plan.count.registration_splits;
                             })
      .def_property_readonly("num_bytes",
                             [](const BoundPlan& self) { return self.plan.count.bytes; })
      .def_property_readonly(
          "one_per_page_and_layer",
          [](const BoundPlan& self) { return self.plan.count.one_per_page_and_layer; })
      .def_property_readonly(
          "neighbours_merged",
          [](const BoundPlan& self) { return self.plan.count.neighbours_merged; })
      .def_property_readonly(
          "fallbacks", [](const BoundPlan& self) { return fallbacks(self.plan.count); },
          "Copies more than whole groups would take, by what makes them necessary.")
      .def(
          "batches",
          [](const BoundPlan& self, std::size_t group) {
            std::int64_t splits = 0;
            return self.batches(group, splits);
          },
          py::arg("group"),
          "(dst, src, width, height, dst_pitch, src_pitch) of each copy, call by call.");

  py::class_<CopyPlanner, std::shared_ptr<CopyPlanner>>(
      module, "CopyPlanner", "Turns pages into the fewest copies that layouts and device allow.")
      .def(py::init([](std::vector<PoolLayout> layouts, const std::string& direction,
                       const CopyLimits& limits, const PlanOptions& options) {
             return std::make_shared<CopyPlanner>(std::move(layouts), direction_of(direction),
                                                  limits, options);
           }),
           py::arg("layouts"), py::kw_only(), py::arg("direction"),
           py::arg("limits") = CopyLimits{}, py::arg("options") = PlanOptions{})
      .def_property_readonly("groups",
                             [](const CopyPlanner& self) {
                               std::vector<BoundGroup> groups;
                               for (const LayerGroup& group : self.groups()) {
                                 groups.push_back(bound_group(self, group));
                               }
                               return groups;
                             })
      .def("plan", &make_plan, py::arg("pages"));
}

}  // namespace

std::map<std::string, std::int64_t> fallbacks(const CopyCount& count) {
  std::map<std::string, std::int64_t> out;
  for (std::size_t i = 0; i < kSpanBreaks; ++i) {
    if (count.fallbacks[i] > 0) {
      out[std::string(name_of(static_cast<SpanBreak>(i)))] = count.fallbacks[i];
    }
  }
  if (count.registration_splits > 0) out["registration boundary"] = count.registration_splits;
  return out;
}

void bind_plans(py::module_& module) {
  bind_layouts(module);
  bind_pages(module);
  bind_planner(module);
}

}  // namespace kvburst::bindings
