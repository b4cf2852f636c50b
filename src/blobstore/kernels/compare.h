// Sums over pairs of weights and what they are read back as (comparison.h), and the ranges of
// groups of codes.
#pragma once

#include <algorithm>

#include "dequantize.h"

namespace blobstore::BLOBSTORE_TARGET {

template <std::size_t L>
using Doubles = Vector<double, L>;

// As many doubles as fill a register of N floats; two even in plain loops, because nearly every
// processor has registers for them.
template <std::size_t N>
inline constexpr std::size_t doubles_for = N == 1 ? 2 : N / 2;

template <typename D>
inline D magnitude_of(D value) {
  using U = Vector<std::uint64_t, sizeof(D) / sizeof(double)>;
  return __builtin_bit_cast(D, __builtin_bit_cast(U, value) & ~(std::uint64_t{1} << 63));
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
inline Doubles<2> doubles_of(Floats<2> value) {
  return __builtin_convertvector(value, Doubles<2>);
}

template <typename Float, std::size_t N>
void to_doubles(const void* given, std::size_t count, double* to) {
  constexpr std::size_t L = doubles_for<N>;
  using Bits = typename Float::Bits;
  const auto* const from = static_cast<const Bits*>(given);
  std::size_t i = 0;
  for (; i + L <= count; i += L) {
    store(to + i, doubles_of(Float::decode(widen<L, Bits>(load<Vector<Bits, L>>(from + i)))));
  }
  for (; i < count; ++i) to[i] = Float::decode(std::uint32_t{from[i]});
}

inline void copy_doubles(const void* from, std::size_t count, double* to) {
  std::memcpy(to, from, count * sizeof *to);
}

template <std::size_t L, bool limited>
void add_groups(const double* weights, const double* read, std::size_t count,
                std::size_t group_size, const double* low, const double* high, Sums& to) {
  constexpr std::size_t parts = sum_lanes / L;
  Doubles<L> sums[6][parts];
  std::memcpy(sums, &to, sizeof to);
  auto& [squared_error, squared_weight, squared_read, product, max_error, beyond] = sums;
  for (std::size_t end = group_size; end <= count; end += group_size, ++low, ++high) {
    for (std::size_t i = end - group_size; i < end; i += sum_lanes) {
#pragma GCC unroll 4
      for (std::size_t k = 0; k < parts; ++k) {
        const auto weight = load<Doubles<L>>(weights + i + k * L);
        const auto back = load<Doubles<L>>(read + i + k * L);
        const Doubles<L> error = back - weight;
        squared_error[k] += error * error;
        squared_weight[k] += weight * weight;
        squared_read[k] += back * back;
        product[k] += weight * back;
        max_error[k] = max_of(magnitude_of(error), max_error[k]);
        if constexpr (limited) {
          const auto is_beyond = (weight <= *low) | (weight >= *high);
          beyond[k] = is_beyond ? beyond[k] + 1.0 : beyond[k];
        }
      }
    }
  }
  std::memcpy(&to, sums, sizeof to);
}

template <std::size_t N>
void add_pairs(const double* weights, const double* read, std::size_t count,
               std::size_t group_size, const double* low, const double* high, Sums& sums) {
  (low ? add_groups<doubles_for<N>, true> : add_groups<doubles_for<N>, false>)(
      weights, read, count, group_size, low, high, sums);
}

// The ranges of the groups of a job: half a step beyond the first and the last code. A scale of
// zero has no steps: no weight compares as beyond NaN.
template <unsigned bits>
void limits_affine(const DequantizeJob& job, double* low, double* high) {
  constexpr double none = std::numeric_limits<double>::quiet_NaN();
  const AffineTile tile(job, 0);
  for (std::size_t group = 0; group < tile.count; ++group) {
    const double scale = tile.scale[group], bias = tile.bias[group];
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
