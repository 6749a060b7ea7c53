#include "settings.h"

#include <charconv>
#include <stdexcept>
#include <string>

namespace stand_in {
namespace {

[[noreturn]] void refuse(std::string_view key, std::string_view value, std::string_view bound) {
  throw std::invalid_argument(std::string(key) + ": '" + std::string(value) + "' is not " +
                              std::string(bound));
}

template <class Number>
Number number(std::string_view key, std::string_view value, Number smallest) {
  Number parsed{};
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), parsed);
  if (error != std::errc{} || end != value.data() + value.size() || parsed < smallest) {
    refuse(key, value, "a whole number of at least " + std::to_string(smallest));
  }
  return parsed;
}

bool flag(std::string_view key, std::string_view value) {
  if (value != "0" && value != "1") refuse(key, value, "0 or 1");
  return value == "1";
}

Order order(std::string_view value) {
  if (value == "eager") return Order::eager;
  if (value == "latest") return Order::latest;
  if (value == "random") return Order::random;
  refuse("order", value, "eager, latest or random");
}

void change(Settings& settings, std::string_view key, std::string_view value) {
  if (key == "version") {
    settings.version = number(key, value, 11030);
  } else if (key == "order") {
    settings.order = order(value);
  } else if (key == "seed") {
    settings.seed = number(key, value, std::uint64_t{0});
  } else if (key == "queue_depth") {
    settings.queue_depth = number(key, value, std::size_t{1});
  } else if (key == "batch_cap") {
    settings.batch_cap = number(key, value, std::size_t{1});
  } else if (key == "max_pitch") {
    settings.max_pitch = number(key, value, std::size_t{1});
  } else if (key == "devices") {
    settings.devices = number(key, value, 0);
  } else if (key == "memory") {
    settings.memory = number(key, value, std::size_t{1} << 16);
  } else if (key == "host_pointers") {
    settings.host_pointers = flag(key, value);
  } else if (key == "checker") {
    settings.checker = flag(key, value);
  } else if (key == "report") {
    settings.report = flag(key, value);
  } else if (key == "strict") {
    settings.strict = flag(key, value);
  } else {
    refuse("setting", key,
           "one of version, order, seed, queue_depth, batch_cap, max_pitch, devices, memory, "
           "host_pointers, checker, report, strict");
  }
}

}  // namespace

Settings changed(Settings base, std::string_view text) {
  while (!text.empty()) {
    const std::string_view item = text.substr(0, text.find(','));
    text.remove_prefix(item.size() == text.size() ? text.size() : item.size() + 1);
    const std::size_t equals = item.find('=');
    if (equals == std::string_view::npos) refuse("setting", item, "of the form key=value");
    change(base, item.substr(0, equals), item.substr(equals + 1));
  }
  return base;
}

}  // namespace stand_in
