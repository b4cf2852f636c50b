// What a search works on: N groups side by side, each in its own lane, so that no sum ever crosses lanes and the result does
// not depend on N.
#pragma once

#include "quantize.h"

namespace blobstore::BLOBSTORE_TARGET {

inline constexpr std::size_t largest_group = 128;  // of docs/formats.md section 3, like all group sizes

// A group keeps what minmax gives it unless a candidate's error is less than this part of minmax's: by more than rounding
// can explain.
inline constexpr float clearly = 1.0f - 0x1p-14f;

// Sums in four interleaved parts: an order that every target and the twin can keep, with a short chain of additions.
template <typename F>
struct Sum {
  F part[4] = {};
  void add(std::size_t i, F value) { part[i % 4] = part[i % 4] + value; }
  F total() const { return (part[0] + part[1]) + (part[2] + part[3]); }
};

template <typename F>
struct Range {
  F low;
  F high;
};

// N groups of weights by column, and what each column counts: 1 unless the importance is given.
template <std::size_t N>
struct Columns {
  using F = typename Lanes<N>::F;
  std::size_t count;
  bool weighted;
  F weights[largest_group];
  F importance[largest_group];

  // The groups from weight `first` of the job on, times a factor.
  template <typename Float>
  Columns(Float, const QuantizeJob& job, std::size_t first, float factor)
      : count(job.group_size), weighted(job.importance != nullptr) {
    const auto* from = static_cast<const typename Float::Bits*>(job.weights) + first;
    float lanes[N];
    for (std::size_t i = 0; i < count; ++i) {
      for (std::size_t g = 0; g < N; ++g) lanes[g] = Float::decode(std::uint32_t{from[g * count + i]});
      weights[i] = load<F>(lanes) * factor;
    }
    if (weighted) read_importance(job, first);
  }
  // Of a column of importance 0 nothing counts, not even an infinite error.
  F counted(std::size_t i, F value) const {
    if (!weighted) return value;
    return importance[i] > 0.0f ? importance[i] * value : F{};
  }
  // The extremes of all weights, or of those that count; infinities the wrong way round when none does.
  Range<F> range(bool counting) const {
    Range<F> found = {all_of<F>(std::numeric_limits<float>::infinity()), all_of<F>(-std::numeric_limits<float>::infinity())};
    for (std::size_t i = 0; i < count; ++i) {
      const auto counts = (counting && weighted ? importance[i] : all_of<F>(1.0f)) > 0.0f;
      found.low = counts ? min_of(found.low, weights[i]) : found.low;
      found.high = counts ? max_of(found.high, weights[i]) : found.high;
    }
    return found;
  }
  F total_importance() const {
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
