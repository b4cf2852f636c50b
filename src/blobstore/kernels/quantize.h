// Quantize and dequantize groups of float weights: the arithmetic of docs/quantization.md, and nothing else.
//
// Knows no Python. Every function works on whole groups of a flat, contiguous array, so that a caller may cut a tensor
// at any row. All arithmetic is IEEE binary32 with round-half-to-even; build with -ffp-contract=off and without
// -ffast-math, or the results differ from MLX and from reference.py.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace blobstore {

inline constexpr std::size_t all_finite = std::numeric_limits<std::size_t>::max();

// Float formats: how one weight is stored, and its exact value as a float.

struct Bf16 {
  using Bits = std::uint16_t;
  static float decode(Bits bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }
  static Bits encode(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;  // NaN: rounding could turn it into an infinity
    return static_cast<Bits>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
};

struct F16 {
  using Bits = std::uint16_t;
  static float decode(Bits bits) {
    const std::uint32_t sign = std::uint32_t{bits & 0x8000u} << 16;
    std::uint32_t magnitude = std::uint32_t{bits & 0x7fffu} << 13;
    if ((bits & 0x7c00u) == 0x7c00u) {
      magnitude |= 0x7f800000u;  // infinity or NaN
    } else {
      // The exponent bias differs by 112; as a multiplication it is right for subnormals too.
      magnitude = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
    }
    return std::bit_cast<float>(sign | magnitude);
  }
  static Bits encode(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const auto sign = static_cast<Bits>((bits >> 16) & 0x8000u);
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return sign | 0x7e00u;
    if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and above round to infinity
    if (magnitude < 0x38800000u) {
      // Below 2^-14 the half's ulp is 2^-24, which is the ulp of floats near 0.5: the addition rounds.
      const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
      return static_cast<Bits>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000u));
    }
    const std::uint32_t rounded = magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u);
    return static_cast<Bits>(sign | (rounded >> 13));
  }
};

struct F32 {
  using Bits = std::uint32_t;
  static float decode(Bits bits) { return std::bit_cast<float>(bits); }
  static Bits encode(float value) { return std::bit_cast<std::uint32_t>(value); }
};

// Small float formats of codes and scales (OCP Microscaling 1.0, sections 5.3.1, 5.3.3 and 5.4.1).

struct E2M1 {
  static constexpr unsigned bits = 4;
  static constexpr float max = 6.0f;
  // Values 0, .5, 1, 1.5, 2, 3, 4, 6; a tie goes to the even code, so every second comparison is strict.
  static std::uint32_t encode(float value) {
    const float magnitude = std::fabs(value);
    const std::uint32_t code = (magnitude > 0.25f) + (magnitude >= 0.75f) + (magnitude > 1.25f) + (magnitude >= 1.75f) +
                               (magnitude > 2.5f) + (magnitude >= 3.5f) + (magnitude > 5.0f);
    return (std::bit_cast<std::uint32_t>(value) >> 31 << 3) | code;
  }
  static float decode(std::uint32_t code) {
    constexpr float values[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                  -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
    return values[code];
  }
};

struct E4M3 {
  static constexpr unsigned bits = 8;
  static constexpr float max = 448.0f;
  static std::uint32_t encode(float value) {
    const auto raw = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t magnitude = raw & 0x7fffffffu;
    std::uint32_t code;
    if (magnitude < 0x3c800000u) {
      // Below 2^-6 the ulp is 2^-9, which is the ulp of floats near 2^14: the addition rounds.
      code = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0x1p14f) - 0x46800000u;
    } else if (magnitude > 0x43e80000u) {
      code = 0x7e;  // above 464 everything saturates at 448
    } else {
      code = (magnitude - (120u << 23) + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
      if (code > 0x7e) code = 0x7e;
    }
    return (raw >> 31 << 7) | code;
  }
  static float decode(std::uint32_t code) {
    if ((code & 0x7fu) == 0x7fu) return std::numeric_limits<float>::quiet_NaN();
    const std::uint32_t sign = (code & 0x80u) << 24;
    const float magnitude = std::bit_cast<float>((code & 0x7fu) << 20) * 0x1p120f;
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
  }
};

// 2^(bits - 127); 255 is NaN.
struct E8M0 {
  // The smallest power of two that is >= value, its exponent clamped to [-127, 127]. Read off the float's bits: a
  // library's log2 may round 2^k * (1 + ulp) down to k.
  static std::uint8_t encode_up(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t exponent = bits >> 23;
    if (exponent == 0) return bits > 0x400000u ? 1 : 0;  // subnormal: 2^-127 is 0x400000
    const std::uint32_t up = exponent + ((bits & 0x7fffffu) != 0);
    return static_cast<std::uint8_t>(up < 254 ? up : 254);
  }
  static float decode(std::uint8_t bits) {
    if (bits == 0) return 0x1p-127f;
    if (bits == 255) return std::numeric_limits<float>::quiet_NaN();
    return std::bit_cast<float>(std::uint32_t{bits} << 23);
  }
};

// The index of the first value that is infinite or NaN, or all_finite.
template <typename Float>
std::size_t first_non_finite(const typename Float::Bits* weights, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    if (!std::isfinite(Float::decode(weights[i]))) return i;
  }
  return all_finite;
}

struct AffineGroup {
  float scale;
  float bias;
};

// MLX's choice of scale and bias (mlx@v0.32.4 mlx/backend/cpu/quantized.cpp: quantize): the edge farther from zero is
// met exactly, and zero is a code.
inline AffineGroup affine_group(float low, float high, float levels) {
  float scale = std::fmax((high - low) / levels, 1e-7f);
  float edge = low;
  if (!(std::fabs(low) > std::fabs(high))) {
    edge = high;
    scale = -scale;
  }
  const float steps = std::nearbyintf(edge / scale);
  if (steps != 0.0f) return {edge / steps, edge};
  return {scale, 0.0f};
}

// round-half-to-even of value clamped to [0, levels]; NaN gives 0. Clamping first is the same, since both bounds are
// whole, and lets the rounding be one addition.
inline std::uint32_t affine_code(float value, float levels) {
  constexpr float magic = 0x1.8p23f;
  float clamped = value > 0.0f ? value : 0.0f;
  clamped = clamped < levels ? clamped : levels;
  return std::bit_cast<std::uint32_t>(clamped + magic) & 0xffu;
}

// count weights -> count * bits / 32 words, and one scale and bias a group. Returns the index of the first non-finite
// weight, and then the outputs are unspecified.
template <typename Float, unsigned bits>
std::size_t quantize_affine(const typename Float::Bits* weights, std::size_t count, std::size_t group_size,
                            std::uint32_t* words, typename Float::Bits* scales, typename Float::Bits* biases) {
  constexpr float levels = (1u << bits) - 1;
  constexpr std::size_t per_word = 32 / bits;
  if (const auto bad = first_non_finite<Float>(weights, count); bad != all_finite) return bad;
  for (std::size_t group = 0; group < count / group_size; ++group) {
    const auto* in = weights + group * group_size;
    float low = Float::decode(in[0]);
    float high = low;
    for (std::size_t i = 1; i < group_size; ++i) {
      const float value = Float::decode(in[i]);
      low = value < low ? value : low;
      high = value > high ? value : high;
    }
    const auto [scale, bias] = affine_group(low, high, levels);
    for (std::size_t i = 0; i < group_size; i += per_word) {
      std::uint32_t word = 0;
      for (std::size_t j = 0; j < per_word; ++j) {
        word |= affine_code((Float::decode(in[i + j]) - bias) / scale, levels) << (j * bits);
      }
      *words++ = word;
    }
    scales[group] = Float::encode(scale);
    biases[group] = Float::encode(bias);
  }
  return all_finite;
}

// Scale policies of the fp types: the stored bits of a group's scale, and the value that codes are divided by.

struct PowerOfTwoScale {
  static std::uint8_t encode(float amax, float code_max) { return E8M0::encode_up(amax / code_max); }
  static float decode(std::uint8_t bits) { return E8M0::decode(bits); }
};

struct E4M3Scale {
  static std::uint8_t encode(float amax, float code_max) { return static_cast<std::uint8_t>(E4M3::encode(amax / code_max)); }
  static float decode(std::uint8_t bits) { return E4M3::decode(bits); }
};

// As quantize_affine, for codes that are small floats. A scale of zero gives codes 0.
template <typename Float, typename Code, typename Scale, std::size_t group_size>
std::size_t quantize_fp(const typename Float::Bits* weights, std::size_t count, std::uint32_t* words, std::uint8_t* scales) {
  constexpr std::size_t per_word = 32 / Code::bits;
  if (const auto bad = first_non_finite<Float>(weights, count); bad != all_finite) return bad;
  for (std::size_t group = 0; group < count / group_size; ++group) {
    const auto* in = weights + group * group_size;
    float amax = 0.0f;
    for (std::size_t i = 0; i < group_size; ++i) {
      const float magnitude = std::fabs(Float::decode(in[i]));
      amax = magnitude > amax ? magnitude : amax;
    }
    scales[group] = Scale::encode(amax, Code::max);
    const float scale = Scale::decode(scales[group]);
    for (std::size_t i = 0; i < group_size; i += per_word) {
      std::uint32_t word = 0;
      for (std::size_t j = 0; j < per_word && scale != 0.0f; ++j) {
        word |= Code::encode(Float::decode(in[i + j]) / scale) << (j * Code::bits);
      }
      *words++ = word;
    }
  }
  return all_finite;
}

// code * scale + bias, as two rounded operations; count values into out.
template <typename Float, unsigned bits>
void dequantize_affine(const std::uint32_t* words, const typename Float::Bits* scales, const typename Float::Bits* biases,
                       std::size_t count, std::size_t group_size, float* out) {
  constexpr std::size_t per_word = 32 / bits;
  constexpr std::uint32_t mask = (1u << bits) - 1;
  for (std::size_t group = 0; group < count / group_size; ++group) {
    const float scale = Float::decode(scales[group]);
    const float bias = Float::decode(biases[group]);
    for (std::size_t i = 0; i < group_size; i += per_word, ++words) {
      for (std::size_t j = 0; j < per_word; ++j) {
        const float product = static_cast<float>((*words >> (j * bits)) & mask) * scale;
        *out++ = product + bias;
      }
    }
  }
}

// code * scale * global_scale, from the left (the first product is exact); count values into out.
template <typename Code, typename Scale, std::size_t group_size>
void dequantize_fp(const std::uint32_t* words, const std::uint8_t* scales, float global_scale, std::size_t count, float* out) {
  constexpr std::size_t per_word = 32 / Code::bits;
  constexpr std::uint32_t mask = (1u << Code::bits) - 1;
  for (std::size_t group = 0; group < count / group_size; ++group) {
    const float scale = Scale::decode(scales[group]);
    for (std::size_t i = 0; i < group_size; i += per_word, ++words) {
      for (std::size_t j = 0; j < per_word; ++j) {
        const float product = Code::decode((*words >> (j * Code::bits)) & mask) * scale;
        *out++ = product * global_scale;
      }
    }
  }
}

}  // namespace blobstore
