// Quantize by minmax: whole groups of a flat, contiguous array, so that a caller may cut a tensor
// at any group.
//
// N groups are one block: each is reduced to its extremes, the scales and biases of all N are
// computed side by side, then each group's codes. A few blocks are one tile. Knows no Python.
#pragma once

#include <algorithm>

#include "groups.h"
#include "kernels.h"
#include "units.h"

namespace blobstore::BLOBSTORE_TARGET {

template <typename Float>
inline const typename Float::Bits* weights_of(const QuantizeJob& job) {
  return static_cast<const typename Float::Bits*>(job.weights);
}

// Asks for a group's part of the next tile: the passes over a tile are too short for the processor
// to foresee it. Addresses after the last weight are harmless.
template <typename T>
inline void prefetch_next_tile(const T* group, std::size_t group_size) {
  const std::size_t nbytes = group_size * sizeof(T);
  const auto next = reinterpret_cast<std::uintptr_t>(group) + tile_groups * nbytes;
  for (std::size_t i = 0; i < nbytes; i += 64) {
    __builtin_prefetch(reinterpret_cast<const void*>(next + i));
  }
}

template <typename Float>
[[gnu::noinline]] bool is_finite(const typename Float::Bits* weights, std::size_t count) {
  typename Float::Bits found = 0;  // a loop without an exit, which compilers turn into vectors
  for (std::size_t i = 0; i < count; ++i) {
    found |= (weights[i] & Float::infinity) == Float::infinity;
  }
  return !found;
}

// The index of the first weight that is infinite or NaN; there is one.
template <typename Float>
[[gnu::noinline]] std::size_t first_non_finite(const typename Float::Bits* weights) {
  std::size_t i = 0;
  while ((weights[i] & Float::infinity) != Float::infinity) ++i;
  return i;
}

// The index of the first weight of the first group with an infinite scale, or all_finite: its range
// overflowed. A bias never does: minmax takes a weight or 0, and a search what has a finite error.
template <typename Float>
std::size_t first_overflow(const QuantizeJob& job) {
  const auto* const scales = static_cast<const typename Float::Bits*>(job.scales);
  if (is_finite<Float>(scales, job.count / job.group_size)) return all_finite;
  return first_non_finite<Float>(scales) * job.group_size;
}

// The lower (offset 0) or upper half of each segment of `width` lanes, those of a and b in turn.
template <std::size_t N, std::size_t width, std::size_t offset, typename V, std::size_t... i>
inline V halves(V a, V b, std::index_sequence<i...>) {
  constexpr std::size_t half = width / 2;
  return __builtin_shufflevector(
      a, b, (i / half / 2 * width + i / half % 2 * N + offset + i % half)...);
}

// Reduces each of `count` vectors to one value, and returns those of vector i in segment i of N /
// count lanes. Reducing all at once costs three instructions a vector instead of two for each
// halving of each.
template <std::size_t N, std::size_t count, std::size_t stride = 1, typename V, typename Op>
inline V across(const V* vectors, Op op) {
  if constexpr (count == 1) {
    return vectors[0];
  } else {
    const auto a = across<N, count / 2, stride * 2>(vectors, op);
    const auto b = across<N, count / 2, stride * 2>(vectors + stride, op);
    constexpr std::size_t width = N / (count / 2);
    using Order = std::make_index_sequence<N>;
    return op(halves<N, width, 0>(a, b, Order()), halves<N, width, width / 2>(a, b, Order()));
  }
}

// Codes of `count` groups from weight `begin` of the job on. Not inlined: minmax and search share it.
template <typename Float, unsigned bits, std::size_t N>
[[gnu::noinline]] void encode_affine(const QuantizeJob& job, std::size_t begin, std::size_t count,
                                     const float* scales, const float* biases) {
  constexpr float levels = (1u << bits) - 1;
  const std::size_t group_size = job.group_size;
  const auto* group = weights_of<Float>(job) + begin;
  std::byte* out = job.codes + begin * bits / 8;
  for (std::size_t g = 0; g < count; ++g, group += group_size, out += group_size * bits / 8) {
    const float scale = scales[g], bias = biases[g];
    for (std::size_t i = 0; i < group_size; i += Unit<N>::size) {
      const auto unit = load_unit<Float, N>(group + i);
      store_codes<bits, N>(out + i * bits / 8, affine_code((unit.even - bias) / scale, levels),
                           affine_code((unit.odd - bias) / scale, levels));
    }
  }
}

// Blocks of N groups from weight `begin` on -> their codes, scales and biases: the extremes of all,
// then the arithmetic of all, then the codes, so that the long chains of one group's arithmetic run
// beside the others'.
template <typename Float, unsigned bits, std::size_t N>
void quantize_affine_tile(const QuantizeJob& job, std::size_t begin, std::size_t blocks) {
  using F = Floats<N>;
  using Bits = typename Float::Bits;
  const std::size_t group_size = job.group_size;
  const Bits* const weights = weights_of<Float>(job) + begin;
  Bits* const scales = static_cast<Bits*>(job.scales) + begin / group_size;
  Bits* const biases = static_cast<Bits*>(job.biases) + begin / group_size;
  F low[tile_groups], high[tile_groups];
  for (std::size_t g = 0; g < blocks * N; ++g) {
    const auto* group = weights + g * group_size;
    prefetch_next_tile(group, group_size);
    const auto first = load_unit<Float, N>(group);
    F lowest = min_of(first.even, first.odd);
    F highest = max_of(first.even, first.odd);
    for (std::size_t i = Unit<N>::size; i < group_size; i += Unit<N>::size) {
      const auto unit = load_unit<Float, N>(group + i);
      lowest = min_of(lowest, min_of(unit.even, unit.odd));
      highest = max_of(highest, max_of(unit.even, unit.odd));
    }
    low[g] = lowest;
    high[g] = highest;
  }
  float scale[tile_groups], bias[tile_groups];
  for (std::size_t g = 0; g < blocks * N; g += N) {
    const F lowest = across<N, N>(low + g, [](F a, F b) { return min_of(a, b); });
    const F highest = across<N, N>(high + g, [](F a, F b) { return max_of(a, b); });
    const auto found = affine_of(lowest, highest, (1u << bits) - 1);
    store_narrow<Bits, N>(scales + g, Float::encode(found.scale));
    store_narrow<Bits, N>(biases + g, Float::encode(found.bias));
    store(scale + g, found.scale);
    store(bias + g, found.bias);
  }
  encode_affine<Float, bits, N>(job, begin, blocks * N, scale, bias);
}

// The groups of a job from weight `start` on; scales and biases are as wide as Scale.
template <typename Float, unsigned bits, typename Scale>
inline QuantizeJob rest_of(QuantizeJob job, std::size_t start, std::size_t group_size) {
  const std::size_t scales_before = start / group_size;
  job.weights = static_cast<const typename Float::Bits*>(job.weights) + start;
  job.count -= start;
  job.codes += start * bits / 8;
  job.scales = static_cast<Scale*>(job.scales) + scales_before;
  if (job.biases) job.biases = static_cast<Scale*>(job.biases) + scales_before;
  job.first_column += start;
  return job;
}

// Calls tile(first weight, blocks) for some blocks of N groups at a time, until a call returns false:
// its weights are not all finite. The plain kernel gets the last groups. Returns the index of the
// first weight that is not finite, or all_finite.
template <typename Float, unsigned bits, typename Scale, std::size_t N, typename Tile>
std::size_t each_tile(const QuantizeJob& job, std::size_t group_size, Tile tile) {
  const auto* const weights = weights_of<Float>(job);
  std::size_t start = 0;
  while (const std::size_t blocks =
             std::min((job.count - start) / group_size, tile_groups) / N) {
    if (!tile(start, blocks)) return start + first_non_finite<Float>(weights + start);
    start += blocks * N * group_size;
  }
  if (start == job.count) return all_finite;
  if (!is_finite<Float>(weights + start, job.count - start)) {
    return start + first_non_finite<Float>(weights + start);
  }
  job.plain(rest_of<Float, bits, Scale>(job, start, group_size));
  return all_finite;
}

// Weights -> codes, and one scale and bias a group.
template <typename Float, unsigned bits, std::size_t N>
std::size_t quantize_affine(const QuantizeJob& job) {
  const auto tile = [&](std::size_t start, std::size_t blocks) {
    const std::size_t size = blocks * N * job.group_size;
    if (!is_finite<Float>(weights_of<Float>(job) + start, size)) return false;
    quantize_affine_tile<Float, bits, N>(job, start, blocks);
    return true;
  };
  using Scale = typename Float::Bits;
  const std::size_t bad = each_tile<Float, bits, Scale, N>(job, job.group_size, tile);
  return bad == all_finite ? first_overflow<Float>(job) : bad;
}

// A group's scale as its weights need it. Only nvfp4 has a global scale, and scales of zero, which
// give codes 0.
struct FpScale {
  float scale, inverse, inverse_global;
};

template <typename Float, typename Type, typename F>
inline BitsOf<F> fp_code(F weights, FpScale by) {
  using Code = typename Type::Code;
  if constexpr (std::is_same_v<typename Type::Scale, E8M0>) {
    return Code::encode(weights * by.inverse);  // exact
  } else {
    const F values = weights * by.inverse_global;
    const auto kept = all_of<BitsOf<F>>(by.scale == 0.0f ? 0u : ~0u);
    if constexpr (std::is_same_v<Float, F32>) return Code::encode(values / by.scale) & kept;
    // A weight of at most 11 significant bits is either at a tie between two codes or further from
    // it than 2^-12 of it (scales and ties have 4 and 3 bits). The product is off by 2^-23 at most:
    // without its last bits it is at the tie when the quotient is, and on the quotient's side
    // otherwise.
    const auto snapped = (bits_of(values * by.inverse) + 0x80u) & 0xffffff00u;
    return Code::encode(float_of(snapped)) & kept;
  }
}

// As encode_affine.
template <typename Float, typename Type, std::size_t N>
[[gnu::noinline]] void encode_fp(const QuantizeJob& job, std::size_t begin, std::size_t count,
                                 const float* scales, const float* inverses,
                                 float inverse_global) {
  constexpr unsigned bits = Type::Code::bits;
  constexpr std::size_t group_size = Type::group_size;
  const auto* group = weights_of<Float>(job) + begin;
  std::byte* out = job.codes + begin * bits / 8;
  for (std::size_t g = 0; g < count; ++g, group += group_size, out += group_size * bits / 8) {
    const FpScale by = {scales[g], inverses[g], inverse_global};
    for (std::size_t i = 0; i < group_size; i += Unit<N>::size) {
      const auto unit = load_unit<Float, N>(group + i);
      store_codes<bits, N>(out + i * bits / 8, fp_code<Float, Type>(unit.even, by),
                           fp_code<Float, Type>(unit.odd, by));
    }
  }
}

// As quantize_affine_tile, for codes that are small floats, of weights over the global scale.
// Returns false, and the outputs are unspecified, if a weight is not finite: magnitudes are
// compared as integers, where infinities and NaN are the largest.
template <typename Float, typename Type, std::size_t N>
bool quantize_fp_tile(const QuantizeJob& job, std::size_t begin, std::size_t blocks) {
  using U = Words<N>;
  constexpr std::size_t group_size = Type::group_size;
  const float inverse_global = 1.0f / job.global_scale;
  const auto* const weights = weights_of<Float>(job) + begin;
  auto* const scales = static_cast<std::uint8_t*>(job.scales) + begin / group_size;
  U amax[tile_groups];
  for (std::size_t g = 0; g < blocks * N; ++g) {
    const auto* group = weights + g * group_size;
    prefetch_next_tile(group, group_size);
    amax[g] = largest_magnitude<Float, N>(group);
    for (std::size_t i = Unit<N>::size; i < group_size; i += Unit<N>::size) {
      amax[g] = max_of(amax[g], largest_magnitude<Float, N>(group + i));
    }
  }
  float scale[tile_groups], inverse[tile_groups];
  for (std::size_t g = 0; g < blocks * N; g += N) {
    const U largest = across<N, N>(amax + g, [](U a, U b) { return max_of(a, b); });
    if (any_of(largest >= Float::infinity)) return false;
    const auto peak = Float::decode(largest) * inverse_global;
    const auto stored = Type::Scale::encode(peak / Type::Code::max);
    store_narrow<std::uint8_t, N>(scales + g, stored);
    const auto decoded = Type::Scale::decode(stored);
    store(scale + g, decoded);
    store(inverse + g, 1.0f / decoded);
  }
  encode_fp<Float, Type, N>(job, begin, blocks * N, scale, inverse, inverse_global);
  return true;
}

// As quantize_affine, for codes that are small floats.
template <typename Float, typename Type, std::size_t most_lanes>
std::size_t quantize_fp(const QuantizeJob& job) {
  constexpr std::size_t N = lanes_for<Type, most_lanes>;
  const auto tile = [&](std::size_t start, std::size_t blocks) {
    return quantize_fp_tile<Float, Type, N>(job, start, blocks);
  };
  return each_tile<Float, Type::Code::bits, std::uint8_t, N>(job, Type::group_size, tile);
}

}  // namespace blobstore::BLOBSTORE_TARGET
