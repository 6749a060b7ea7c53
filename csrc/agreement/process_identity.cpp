#include "agreement/process_identity.h"

#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <optional>
#include <sstream>

#include "core/format.h"

namespace kvburst {
namespace {

/// From the kernel's include/linux/sched.h: set in a task's flags when it begins to exit, and still
/// when it has, until its parent has asked for it.
constexpr unsigned long kExiting = 0x4;

struct Status {
  unsigned long flags;
  std::uint64_t started;
};

/// From /proc/PID/stat; see proc(5) for its fields. None if it cannot be read.
std::optional<Status> status_of(std::int64_t pid) {
  std::ifstream file(text("/proc/", pid, "/stat"));
  std::string line;
  std::getline(file, line);
  // The name, in brackets, is the second field; it may have blanks and brackets of its own.
  const std::size_t name_end = line.rfind(") ");
  if (name_end == std::string::npos) return std::nullopt;
  std::istringstream fields(line.substr(name_end + 2));
  std::string skipped;
  Status status{};
  for (int field = 3; field < 9; ++field) fields >> skipped;
  fields >> status.flags;
  for (int field = 10; field < 22; ++field) fields >> skipped;
  fields >> status.started;
  return fields ? std::optional(status) : std::nullopt;
}

std::uint64_t own_name_space() {
  struct stat found{};
  return stat("/proc/self/ns/pid", &found) == 0 ? static_cast<std::uint64_t>(found.st_ino) : 0;
}

}  // namespace

ProcessIdentity ProcessIdentity::own() {
  const std::int64_t pid = getpid();
  const std::optional<Status> status = status_of(pid);
  if (!status) return {pid, 0, 0};
  return {pid, status->started, own_name_space()};
}

bool ProcessIdentity::ended() const {
  if (name_space == 0 || name_space != own_name_space()) return false;
  const std::optional<Status> status = status_of(pid);
  // Whoever is out of file descriptors cannot read it, and must not take the others for dead.
  if (!status) return kill(static_cast<pid_t>(pid), 0) != 0 && errno == ESRCH;
  return status->started != started || (status->flags & kExiting) != 0;
}

std::string ProcessIdentity::words() const { return text("pid ", pid); }

}  // namespace kvburst
