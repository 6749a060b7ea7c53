#pragma once

namespace kvburst {

/// A modelled link between host and device, so that a machine without one shows the timeline of a
/// machine that has one. Copies still move their bytes; what is modelled is how long the calling
/// thread is held for each and when each is done. Everything measured with it is simulated, and
/// must say so where it is shown.
struct LinkModel {
  /// 10^9 bytes a second, each direction on its own.
  double gigabytes_per_second = 0;
  /// Microseconds the calling thread is held for a copy of one row.
  double issue_us = 0;
  /// The same for a copy of several rows.
  double tall_issue_us = 0;
  /// Copies that may be outstanding on a stream before the calling thread is held; 0 is no bound.
  int queue_depth = 0;
  /// Modelled bytes for each byte that really moves: the rows in memory may be smaller than those
  /// of the geometry whose timeline is shown.
  double byte_scale = 1;

  /// Throws LayoutError, naming the field, its value and its bound.
  void check() const;
};

}  // namespace kvburst
