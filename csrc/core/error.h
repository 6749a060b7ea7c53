#pragma once

#include <stdexcept>
#include <string>

namespace kvburst {

/// Base of everything this library throws. Each kind is mapped once, in the bindings, to the
/// Python exception of the same name. Messages name the argument, the value and the bound.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A pool, plan or device was described in a way that cannot be served.
class LayoutError : public Error {
 public:
  using Error::Error;
};

/// Page or slot indices that are refused before anything moves.
class PageError : public Error {
 public:
  using Error::Error;
};

/// A device operation failed, or a stream or event handle is not one of the device's.
class DeviceError : public Error {
 public:
  using Error::Error;
};

/// A burst failed; thrown at everyone who waits for it.
class BurstError : public Error {
 public:
  using Error::Error;
};

}  // namespace kvburst
