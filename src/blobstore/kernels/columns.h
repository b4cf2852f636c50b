// The input of a search: N groups side by side, each in its own lane, so that a sum never crosses
// lanes and the result does not depend on N.
#pragma once

#include "quantize.h"

namespace blobstore::BLOBSTORE_TARGET {

inline constexpr std::size_t largest_group = 128;  // docs/formats.md section 3

// A group keeps minmax's scale unless a candidate's error is less than this part of minmax's: by
// more than rounding can explain.
inline constexpr float clearly = 1.0f - 0x1p-14f;

// Sums in four interleaved parts: an order that every target and the twin can keep, with a short
// chain of additions.
template <typename F>
struct Sum {
  F part[4] = {};
  void add(std::size_t i, F value) { part[i % 4] = part[i % 4] + value; }
  F total() const { return (part[0] + part[1]) + (part[2] + part[3]); }
};

template <typename F>
struct Range {
  F low, high;
};

// N groups of weights by column, and what each column counts: 1 unless the importance is given.
template <std::size_t N>
struct Columns {
  using F = Floats<N>;
  std::size_t count;
  bool weighted;
  F weights[largest_group];
  F importance[largest_group];

  // The groups from weight `first` of the job on, times a factor.
  template <typename Float>
  [[gnu::noinline]] Columns(Float, const QuantizeJob& job, std::size_t first, float factor)
      : count(job.group_size), weighted(job.importance != nullptr) {
    const auto* const from = weights_of<Float>(job) + first;
    float lanes[N];
    for (std::size_t i = 0; i < count; ++i) {
      for (std::size_t g = 0; g < N; ++g) {
        lanes[g] = Float::decode(std::uint32_t{from[g * count + i]});
      }
      weights[i] = load<F>(lanes) * factor;
    }
    if (weighted) read_importance(job, first);
  }
  // A column of importance 0 counts 0, even if its error is infinite.
  F counted(std::size_t i, F value) const {
    if (!weighted) return value;
    return importance[i] > 0.0f ? importance[i] * value : F{};
  }
  // The extremes of all weights, or of those that count; infinity and its negative if none does.
  [[gnu::noinline]] Range<F> range(bool counting) const {
    constexpr float infinity = std::numeric_limits<float>::infinity();
    Range<F> found = {all_of<F>(infinity), all_of<F>(-infinity)};
    for (std::size_t i = 0; i < count; ++i) {
      const auto counts = (counting && weighted ? importance[i] : all_of<F>(1.0f)) > 0.0f;
      found.low = counts ? min_of(found.low, weights[i]) : found.low;
      found.high = counts ? max_of(found.high, weights[i]) : found.high;
    }
    return found;
  }
  [[gnu::noinline]] F total_importance() const {
    if (!weighted) return all_of<F>(static_cast<float>(count));
    Sum<F> sum;
    for (std::size_t i = 0; i < count; ++i) sum.add(i, importance[i]);
    return sum.total();
  }

 private:
  void read_importance(const QuantizeJob& job, std::size_t first) {
    float lanes[largest_group * N];
    for (std::size_t g = 0; g < N; ++g) {
      std::size_t column = (job.first_column + first + g * count) % job.columns;
      for (std::size_t i = 0; i < count; ++i) {
        lanes[i * N + g] = job.importance[column];
        if (++column == job.columns) column = 0;
      }
    }
    for (std::size_t i = 0; i < count; ++i) importance[i] = load<F>(lanes + i * N);
  }
};

}  // namespace blobstore::BLOBSTORE_TARGET
