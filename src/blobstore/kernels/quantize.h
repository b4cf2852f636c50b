// Quantize by minmax: whole groups of a flat, contiguous array, so that a caller may cut a tensor at any group.
//
// N groups are one block: each is reduced to its extremes, the scales and biases of all N are computed side by side, then
// each group's codes. Knows no Python.
#pragma once

#include "groups.h"
#include "kernels.h"
#include "units.h"

namespace blobstore::BLOBSTORE_TARGET {

// The index of the first weight that is infinite or NaN, or all_finite.
template <typename Float>
std::size_t first_non_finite(const typename Float::Bits* weights, std::size_t count) {
  using Bits = typename Float::Bits;
  Bits found = 0;  // a loop without an exit, which compilers turn into vectors
  for (std::size_t i = 0; i < count; ++i) found |= (weights[i] & Float::infinity) == Float::infinity;
  if (!found) return all_finite;
  std::size_t i = 0;
  while ((weights[i] & Float::infinity) != Float::infinity) ++i;
  return i;
}

// Lanes that are shared by the groups of a block; see across().
template <std::size_t N, std::size_t width, std::size_t offset, std::size_t... i>
inline Vector<float, N> halves(Vector<float, N> a, Vector<float, N> b, std::index_sequence<i...>) {
  // Segments of `width` lanes, from a and b in turn; of each one half.
  constexpr std::size_t half = width / 2;
  return __builtin_shufflevector(a, b, (i / half / 2 * width + i / half % 2 * N + offset + i % half)...);
}

// Reduces each of `count` vectors to one value, and returns those of vector i in segment i of N / count lanes.
// Reducing all at once costs three instructions a vector instead of two for each halving of each.
template <std::size_t N, std::size_t count, std::size_t stride = 1, typename Op>
inline Vector<float, N> across(const Vector<float, N>* vectors, Op op) {
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

template <typename Float, unsigned bits, std::size_t N>
inline void encode_affine(const typename Float::Bits* group, std::size_t group_size, float scale, float bias, std::byte* out) {
  constexpr float levels = (1u << bits) - 1;
  for (std::size_t i = 0; i < group_size; i += Unit<N>::size) {
    const auto unit = load_unit<Float, N>(group + i);
    store_codes<bits, N>(out + i * bits / 8, affine_code((unit.even - bias) / scale, levels),
                         affine_code((unit.odd - bias) / scale, levels));
  }
}

// N groups of weights -> their codes, scales and biases.
template <typename Float, unsigned bits, std::size_t N>
inline void quantize_affine_block(const typename Float::Bits* weights, std::size_t group_size, std::byte* codes,
                                  typename Float::Bits* scales, typename Float::Bits* biases) {
  using F = typename Lanes<N>::F;
  F low[N], high[N];
  for (std::size_t g = 0; g < N; ++g) {
    const auto* group = weights + g * group_size;
    const auto first = load_unit<Float, N>(group);
    low[g] = min_of(first.even, first.odd);
    high[g] = max_of(first.even, first.odd);
    for (std::size_t i = Unit<N>::size; i < group_size; i += Unit<N>::size) {
      const auto unit = load_unit<Float, N>(group + i);
      low[g] = min_of(low[g], min_of(unit.even, unit.odd));
      high[g] = max_of(high[g], max_of(unit.even, unit.odd));
    }
  }
  const auto found = affine_of(across<N, N>(low, [](F a, F b) { return min_of(a, b); }),
                               across<N, N>(high, [](F a, F b) { return max_of(a, b); }), (1u << bits) - 1);
  store_narrow<typename Float::Bits, N>(scales, Float::encode(found.scale));
  store_narrow<typename Float::Bits, N>(biases, Float::encode(found.bias));
  float scale[N], bias[N];
  store(scale, found.scale);
  store(bias, found.bias);
  for (std::size_t g = 0; g < N; ++g) {
    const std::size_t start = g * group_size;
    encode_affine<Float, bits, N>(weights + start, group_size, scale[g], bias[g], codes + start * bits / 8);
  }
}

// count weights -> count * bits / 8 bytes of codes, and one scale and bias a group. Returns the index of the first
// non-finite weight, and then the outputs are unspecified.
template <typename Float, unsigned bits, std::size_t N>
std::size_t quantize_affine(const typename Float::Bits* weights, std::size_t count, std::size_t group_size, std::byte* codes,
                            typename Float::Bits* scales, typename Float::Bits* biases) {
  for (std::size_t start = 0; start < count;) {
    const std::size_t groups = (count - start) / group_size < N ? 1 : N;
    const std::size_t size = groups * group_size;
    const std::size_t bad = first_non_finite<Float>(weights + start, size);
    if (bad != all_finite) return start + bad;
    const std::size_t group = start / group_size;
    const auto quantize = groups == N ? quantize_affine_block<Float, bits, N> : quantize_affine_block<Float, bits, 1>;
    quantize(weights + start, group_size, codes + start * bits / 8, scales + group, biases + group);
    start += size;
  }
  return all_finite;
}

// A group's scale as its weights need it. Only nvfp4 has a global scale, and scales of zero, which give codes 0.
struct FpScale {
  float scale;
  float inverse;
  float inverse_global;
};

template <typename Float, typename Type, typename F>
inline BitsOf<F> fp_code(F weights, FpScale by) {
  using Code = typename Type::Code;
  if constexpr (std::is_same_v<typename Type::Scale, PowerOfTwoScale>) {
    return Code::encode(weights * by.inverse);  // exact
  } else {
    const F values = weights * by.inverse_global;
    const auto kept = all_of<BitsOf<F>>(by.scale == 0.0f ? 0u : ~0u);
    if constexpr (std::is_same_v<Float, F32>) return Code::encode(values / by.scale) & kept;
    // A weight of at most 11 significant bits is either at a tie between two codes or further from it than 2^-12 of it
    // (scales and ties have 4 and 3 bits). The product is off by 2^-23 at most: without its last bits it is at the tie
    // when the quotient is, and on the quotient's side otherwise.
    const auto snapped = (bits_of(values * by.inverse) + 0x80u) & 0xffffff00u;
    return Code::encode(float_of(snapped)) & kept;
  }
}

template <typename Float, typename Type, std::size_t N>
inline void encode_fp(const typename Float::Bits* group, FpScale by, std::byte* out) {
  constexpr unsigned bits = Type::Code::bits;
  for (std::size_t i = 0; i < Type::group_size; i += Unit<N>::size) {
    const auto unit = load_unit<Float, N>(group + i);
    store_codes<bits, N>(out + i * bits / 8, fp_code<Float, Type>(unit.even, by), fp_code<Float, Type>(unit.odd, by));
  }
}

// N groups of weights, times inverse_global, -> their codes and scales.
template <typename Float, typename Type, std::size_t N>
inline void quantize_fp_block(const typename Float::Bits* weights, float inverse_global, std::byte* codes,
                              std::uint8_t* scales) {
  using F = typename Lanes<N>::F;
  using Scale = typename Type::Scale;
  constexpr std::size_t group_size = Type::group_size;
  F amax[N];
  for (std::size_t g = 0; g < N; ++g) {
    amax[g] = F{};
    for (std::size_t i = 0; i < group_size; i += Unit<N>::size) {
      const auto unit = load_unit<Float, N>(weights + g * group_size + i);
      amax[g] = max_of(amax[g], max_of(abs_of(unit.even), abs_of(unit.odd)));
    }
  }
  const auto stored = Scale::encode(across<N, N>(amax, [](F a, F b) { return max_of(a, b); }) * inverse_global, Type::Code::max);
  store_narrow<std::uint8_t, N>(scales, stored);
  const F decoded = Scale::decode(stored);
  float scale[N], inverse[N];
  store(scale, decoded);
  store(inverse, 1.0f / decoded);
  for (std::size_t g = 0; g < N; ++g) {
    const std::size_t start = g * group_size;
    encode_fp<Float, Type, N>(weights + start, {scale[g], inverse[g], inverse_global},
                              codes + start * Type::Code::bits / 8);
  }
}

// As quantize_affine, for codes that are small floats.
template <typename Float, typename Type, std::size_t most_lanes>
std::size_t quantize_fp(const typename Float::Bits* weights, std::size_t count, float inverse_global, std::byte* codes,
                        std::uint8_t* scales) {
  constexpr std::size_t N = most_lanes < Type::group_size / 2 ? most_lanes : Type::group_size / 2;
  for (std::size_t start = 0; start < count;) {
    const std::size_t groups = (count - start) / Type::group_size < N ? 1 : N;
    const std::size_t size = groups * Type::group_size;
    const std::size_t bad = first_non_finite<Float>(weights + start, size);
    if (bad != all_finite) return start + bad;
    const auto quantize = groups == N ? quantize_fp_block<Float, Type, N> : quantize_fp_block<Float, Type, 1>;
    quantize(weights + start, inverse_global, codes + start * Type::Code::bits / 8, scales + start / Type::group_size);
    start += size;
  }
  return all_finite;
}

}  // namespace blobstore::BLOBSTORE_TARGET
