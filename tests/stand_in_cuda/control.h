#pragma once

#include <cstddef>
#include <cstdint>

/// The stand-in driver's own interface: what a test sets, and what it reads afterwards. A C
/// interface in the library that stands for libcuda, found by name. Every function may be called
/// from any thread; only those that say so block. None of them is recorded as a call, and none of
/// them needs a current context.
extern "C" {

/// Changes settings: "version=12080,order=latest,seed=3". The environment's KVBURST_STAND_IN, in
/// the same form, is what they are to begin with; README.md lists them. 0, or 1 and
/// stand_in_error() says what is wrong, and nothing is changed.
int stand_in_configure(const char* settings);
/// The text of the calling thread's last refusal. Lives until its next one.
const char* stand_in_error();

/// The `nth` call of the function from now on (1: the next) returns `code` and does nothing. The
/// function is named as in cuda.h, without _v2. "*": from now on every call but those that need no
/// cuInit, whatever `nth` is: a driver that is shutting down, or an error that stays. Code 0 takes
/// back all that is left.
void stand_in_fail(const char* function, std::uint64_t nth, unsigned int code);

/// A finished or running call; see CallSubject for the zeros.
struct StandInCall {
  const char* function;
  std::uint32_t thread;
  std::uint32_t result;
  std::uint64_t stream;
  std::uint64_t event;
  std::uint64_t address;
  std::uint64_t bytes;
  std::uint64_t copies;
};

/// How often the function was called; every call if it is null.
std::uint64_t stand_in_call_count(const char* function);
/// The calls kept in full (a million at most), and one of them; 1 if there is no such call.
std::uint64_t stand_in_recorded();
int stand_in_call(std::uint64_t index, StandInCall* call);

/// Unordered accesses, one for each pair of calls, and the text of one: its length, of which as
/// much as fits is written, ended by a zero.
std::uint64_t stand_in_finding_count();
std::size_t stand_in_finding(std::uint64_t index, char* text, std::size_t size);
/// Everything in one text: counts, what is open, findings.
std::size_t stand_in_report(char* text, std::size_t size);

/// What is open, and sums since the begin or the last reset.
struct StandInCounts {
  std::uint64_t streams;  ///< created and not destroyed
  std::uint64_t events;
  std::uint64_t allocations;  ///< of device memory
  std::uint64_t pinned;       ///< of cuMemHostAlloc
  std::uint64_t registrations;
  std::uint64_t retained;      ///< primary contexts, each as often as it is retained
  std::uint64_t registered;    ///< sum
  std::uint64_t unregistered;  ///< sum
  std::uint64_t copies;        ///< sum, of all copy calls
  std::uint64_t copied_bytes;  ///< sum
};
void stand_in_counts(StandInCounts* counts);

/// The test's own code reads or writes memory, here and now.
void stand_in_host_read(const void* address, std::size_t bytes);
void stand_in_host_write(void* address, std::size_t bytes);

/// Takes memory of the test for device memory of the device's primary context, until it is
/// disowned. 1 if the driver knows a byte of it already, or does not know it.
int stand_in_adopt(void* address, std::size_t bytes, int device);
int stand_in_disown(void* address);

/// Enqueues a wait for the test: the stream stands until it is released. A gate, or 0 if there is
/// no such stream. Not an order: the checker takes nothing from it.
std::uint64_t stand_in_stall(std::uint64_t stream);
/// 1 if there is no such gate, or it is open already.
int stand_in_release(std::uint64_t gate);
/// Enqueues `microseconds` of work that touches nothing; or work that reads (`write` 0) or writes
/// these bytes, as far as the checker is concerned. 1 if there is no such stream. Block while the
/// stream's queue is full.
int stand_in_busy(std::uint64_t stream, double microseconds);
int stand_in_touch(std::uint64_t stream, const void* address, std::size_t bytes, int write);

/// Blocks until nothing more can run without being asked for. A host function that runs is waited
/// for.
void stand_in_settle();
/// Opens every gate, lets all streams do all their work, and blocks until it is done. 1 if that
/// takes longer than `seconds`: a host function does not return.
int stand_in_finish(double seconds);
/// `stand_in_finish`, then everything is as at the begin, the settings included. Handles, contexts
/// and memory from before are no more.
int stand_in_reset(double seconds);
}
