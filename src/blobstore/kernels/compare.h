// Compare weights with what they are read back as: sums of squares and products, the largest error,
// and how many weights lie beyond their group's codes.
//
// All arithmetic is IEEE binary64 of exact values. Pair i is added to lane i % 8 of every sum, in
// order, and the eight lanes are added at the end, so the bits depend neither on the target nor on
// where a group ends. The lanes of a target are vectors of L doubles, 8 / L of them a sum. Stored
// values are dequantized a block at a time, which stays in the first cache.
#pragma once

#include <algorithm>
#include <array>

#include "groups.h"
#include "kernels.h"
#include "units.h"

namespace blobstore::BLOBSTORE_TARGET {

inline constexpr std::size_t sum_lanes = 8;
inline constexpr std::size_t block_weights = 1024;  // whole groups of every size
inline constexpr std::size_t smallest_group = 16;

template <std::size_t L>
using Doubles = Vector<double, L>;

// As many doubles as fill a register of N floats; two even in plain loops, because nearly every
// processor has registers for them.
template <std::size_t N>
inline constexpr std::size_t doubles_for = N == 1 ? 2 : N / 2;

struct F64 {
  using Bits = std::uint64_t;
};

template <typename F>
inline auto doubles_of(F value) {
  return __builtin_convertvector(value, Doubles<sizeof(F) / sizeof(float)>);
}
// In one instruction each, which GCC does not find.
#if defined(__AVX2__)
inline Doubles<4> max_of(Doubles<4> a, Doubles<4> b) { return _mm256_max_pd(a, b); }
inline Doubles<4> doubles_of(Floats<4> value) { return _mm256_cvtps_pd(value); }
#endif
#if defined(__AVX512F__)
inline Doubles<8> max_of(Doubles<8> a, Doubles<8> b) { return _mm512_max_pd(a, b); }
inline Doubles<8> doubles_of(Floats<8> value) { return _mm512_cvtps_pd(value); }
#endif

template <typename D>
inline D magnitude_of(D value) {
  using U = Vector<std::uint64_t, sizeof(D) / sizeof(double)>;
  return __builtin_bit_cast(D, __builtin_bit_cast(U, value) & ~(std::uint64_t{1} << 63));
}

template <typename Float, std::size_t L>
inline Doubles<L> load_doubles(const typename Float::Bits* from) {
  if constexpr (std::is_same_v<Float, F64>) {
    return load<Doubles<L>>(from);
  } else {
    using Bits = typename Float::Bits;
    return doubles_of(Float::decode(widen<L, Bits>(load<Vector<Bits, L>>(from))));
  }
}

// Values at most `low` or at least `high` lie beyond the codes of their group.
struct Range64 {
  double low, high;
};

template <std::size_t L>
class Sums {
 public:
  // Adds eight pairs.
  template <typename Weight, typename Read, bool limited>
  void add(const typename Weight::Bits* weights, const typename Read::Bits* read, Range64 range) {
    const auto add_part = [&]<std::size_t k>(std::integral_constant<std::size_t, k>) {
      const auto weight = load_doubles<Weight, L>(weights + k * L);
      const auto back = load_doubles<Read, L>(read + k * L);
      const Doubles<L> error = back - weight;
      squared_error_[k] += error * error;
      squared_weight_[k] += weight * weight;
      squared_read_[k] += back * back;
      product_[k] += weight * back;
      max_error_[k] = max_of(magnitude_of(error), max_error_[k]);
      if constexpr (limited) {
        const auto is_beyond = (weight <= range.low) | (weight >= range.high);
        beyond_[k] = is_beyond ? beyond_[k] + 1.0 : beyond_[k];
      }
    };
    [&]<std::size_t... k>(std::index_sequence<k...>) {
      (add_part(std::integral_constant<std::size_t, k>()), ...);
    }(std::make_index_sequence<parts>());
  }

  Comparison total() const {
    const auto largest = lanes_of(max_error_);
    return {
        .squared_error = sum_of(squared_error_),
        .squared_weight = sum_of(squared_weight_),
        .squared_read = sum_of(squared_read_),
        .product = sum_of(product_),
        .max_error = *std::max_element(largest.begin(), largest.end()),
        .beyond = static_cast<std::size_t>(sum_of(beyond_)),
    };
  }

 private:
  static constexpr std::size_t parts = sum_lanes / L;
  using Part = std::array<Doubles<L>, parts>;

  static std::array<double, sum_lanes> lanes_of(const Part& part) {
    return __builtin_bit_cast(std::array<double, sum_lanes>, part);
  }
  static double sum_of(const Part& part) {
    const auto lane = lanes_of(part);
    const double first = (lane[0] + lane[1]) + (lane[2] + lane[3]);
    const double last = (lane[4] + lane[5]) + (lane[6] + lane[7]);
    return first + last;
  }

  Part squared_error_{}, squared_weight_{}, squared_read_{}, product_{}, max_error_{}, beyond_{};
};

template <typename Weight, typename Read, std::size_t N>
Comparison compare(const CompareJob& job) {
  const auto* const weights = static_cast<const typename Weight::Bits*>(job.weights);
  const auto* const read = static_cast<const typename Read::Bits*>(job.read);
  Sums<doubles_for<N>> sums;
  const std::size_t whole = job.count / sum_lanes * sum_lanes;
  for (std::size_t i = 0; i < whole; i += sum_lanes) {
    sums.template add<Weight, Read, false>(weights + i, read + i, {});
  }
  // Pairs of zeros add nothing to a lane.
  typename Weight::Bits last_weights[sum_lanes] = {};
  typename Read::Bits last_read[sum_lanes] = {};
  std::copy(weights + whole, weights + job.count, last_weights);
  std::copy(read + whole, read + job.count, last_read);
  sums.template add<Weight, Read, false>(last_weights, last_read, {});
  return sums.total();
}

// `count` stored values of a job from index `start` on, where a group begins.
inline DequantizeJob part_of(const CompareStoredJob& job, std::size_t start, std::size_t count) {
  DequantizeJob part = job.stored;
  const std::size_t scales_before = start / part.group_size * job.scale_nbytes;
  part.count = count;
  part.codes += start * job.code_bits / 8;
  part.scales = static_cast<const std::byte*>(part.scales) + scales_before;
  if (part.biases) part.biases = static_cast<const std::byte*>(part.biases) + scales_before;
  return part;
}

// Weights against the values of whole groups of codes.
template <typename Weight, std::size_t N>
Comparison compare_stored(const CompareStoredJob& job) {
  const auto* const weights = static_cast<const typename Weight::Bits*>(job.weights);
  const std::size_t group_size = job.stored.group_size;
  std::uint32_t values[block_weights];
  double low[block_weights / smallest_group], high[block_weights / smallest_group];
  Sums<doubles_for<N>> sums;
  for (std::size_t start = 0; start < job.stored.count; start += block_weights) {
    const std::size_t count = std::min(block_weights, job.stored.count - start);
    DequantizeJob block = part_of(job, start, count);
    block.out = values;
    job.dequantize(block);
    job.limits(block, low, high);
    for (std::size_t i = 0, group = 0; i < count; ++group) {
      const Range64 range = {low[group], high[group]};
      for (const std::size_t end = i + group_size; i < end; i += sum_lanes) {
        sums.template add<Weight, F32, true>(weights + start + i, values + i, range);
      }
    }
  }
  return sums.total();
}

// The ranges of the groups of a job: half a step beyond the first and the last code. A scale of
// zero has no steps: no weight compares as beyond NaN.
template <typename Float, unsigned bits>
void limits_affine(const DequantizeJob& job, double* low, double* high) {
  constexpr double none = std::numeric_limits<double>::quiet_NaN();
  const auto* const scales = static_cast<const typename Float::Bits*>(job.scales);
  const auto* const biases = static_cast<const typename Float::Bits*>(job.biases);
  for (std::size_t group = 0; group < job.count / job.group_size; ++group) {
    const double scale = Float::decode(std::uint32_t{scales[group]});
    const double bias = Float::decode(std::uint32_t{biases[group]});
    const double first = bias - 0.5 * scale;
    const double last = bias + ((1u << bits) - 0.5) * scale;
    low[group] = scale != 0 ? std::min(first, last) : none;
    high[group] = scale != 0 ? std::max(first, last) : none;
  }
}

// Half-way from the largest code to the next value that a longer type would have, on both sides.
// A weight of zero is never beyond.
template <typename Type>
void limits_fp(const DequantizeJob& job, double* low, double* high) {
  constexpr double least = std::numeric_limits<double>::denorm_min();
  const auto* const scales = static_cast<const std::uint8_t*>(job.scales);
  for (std::size_t group = 0; group < job.count / Type::group_size; ++group) {
    const double stored = decoded<typename Type::Scale>(std::uint32_t{scales[group]});
    const double scale = stored * job.global_scale;
    const double beyond = Type::Code::beyond * scale;
    high[group] = beyond < least ? least : beyond;
    low[group] = -high[group];
  }
}

}  // namespace blobstore::BLOBSTORE_TARGET
