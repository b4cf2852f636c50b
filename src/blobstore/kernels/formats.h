// Number formats: how floats, codes and scales are stored, and their exact values.
//
// Every function here takes one value or a vector of them (lanes.h) and does the same to each. All
// arithmetic is IEEE binary32 with round-half-to-even; build with -ffp-contract=off and without
// -ffast-math, or the results differ from MLX and from reference.py. No operation on usual weights
// touches float32's subnormals, which some processors are slow at.
#pragma once

#include <array>
#include <limits>

#include "lanes.h"

namespace blobstore::BLOBSTORE_TARGET {

// Float formats. Bits is what one weight is stored as; decode takes its bits in the low end of 32
// and ignores the others.

struct Bf16 {
  using Bits = std::uint16_t;
  static constexpr Bits infinity = 0x7f80;
  template <typename U>
  static FloatOf<U> decode(U bits) {
    return float_of(bits << 16);
  }
  template <typename F>
  static BitsOf<F> encode(F value) {
    const auto bits = bits_of(value);
    const auto rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    // Rounding could turn a NaN into an infinity.
    return (bits & 0x7fffffffu) > 0x7f800000u ? all_of<BitsOf<F>>(0x7fc0u) : rounded;
  }
};

struct F16 {
  using Bits = std::uint16_t;
  static constexpr Bits infinity = 0x7c00;
  template <typename U>
  static FloatOf<U> decode(U bits) {
    const U magnitude = (bits & 0x7fffu) << 13;
    // The exponent bias differs by 112; as a multiplication it is right for subnormals too.
    const U finite = bits_of(float_of(magnitude) * 0x1p112f);
    const U special = magnitude | 0x7f800000u;
    return float_of(((bits & 0x8000u) << 16) | ((bits & 0x7c00u) == 0x7c00u ? special : finite));
  }
  template <typename F>
  static BitsOf<F> encode(F value) {
    using U = BitsOf<F>;
    const U bits = bits_of(value);
    const U magnitude = bits & 0x7fffffffu;
    const U normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    // Below 2^-14 the half's ulp is 2^-24, the ulp of floats near 0.5: the addition rounds.
    const U subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
    const U finite = magnitude < 0x38800000u ? subnormal : normal;
    // 65520 and above round to infinity.
    const U limited = magnitude >= 0x477ff000u ? all_of<U>(0x7c00u) : finite;
    return ((bits >> 16) & 0x8000u) | (magnitude > 0x7f800000u ? all_of<U>(0x7e00u) : limited);
  }
};

struct F32 {
  using Bits = std::uint32_t;
  static constexpr Bits infinity = 0x7f800000;
  template <typename U>
  static FloatOf<U> decode(U bits) {
    return float_of(bits);
  }
  template <typename F>
  static BitsOf<F> encode(F value) {
    return bits_of(value);
  }
};

// A float format of 4 or 8 bits with subnormals and without infinities (OCP Microscaling 1.0,
// sections 5.3.1 and 5.3.3).
template <unsigned width, unsigned mantissa, unsigned bias, unsigned largest>
struct SmallFloat {
  static constexpr unsigned bits = width;
  static constexpr float max = largest;
  static constexpr unsigned sign_bit = 1u << (width - 1);
  static constexpr unsigned exponent_shift = 23 - mantissa;
  static constexpr std::uint32_t smallest_normal = (128 - bias) << 23;  // as the bits of a float

  // Rounded to the nearest value, a tie to the even code; saturated at the largest.
  template <typename F>
  static BitsOf<F> encode(F value) {
    const F magnitude = min_of(abs_of(value), all_of<F>(max));
    const auto exponent = exponent_of(magnitude);
    const auto rounder = rounder_of(exponent);
    const auto steps = bits_of(magnitude + float_of(rounder)) - rounder;
    const auto code = steps + (exponent >> exponent_shift) - (smallest_normal >> exponent_shift);
    return code | ((bits_of(value) >> (32 - width)) & sign_bit);
  }
  // The magnitude of what encode gives to a value >= 0; NaN gives the largest.
  template <typename F>
  static F rounded_magnitude(F value) {
    const F magnitude = min_of(value, all_of<F>(max));
    const F rounder = float_of(rounder_of(exponent_of(magnitude)));
    return (magnitude + rounder) - rounder;
  }
  template <typename U>
  static constexpr FloatOf<U> decode(U code) {
    const U magnitude = code & (sign_bit - 1);
    const auto normal = float_of((magnitude << exponent_shift) + ((127 - bias) << 23));
    const auto subnormal = (normal + normal) - float_of(smallest_normal);
    const auto value = magnitude < (1u << mantissa) ? subnormal : normal;
    return float_of(bits_of(value) | ((code & sign_bit) << (32 - width)));
  }

 private:
  // The exponent that a magnitude has in the small format, as a float's bits.
  template <typename F>
  static BitsOf<F> exponent_of(F magnitude) {
    return max_of(bits_of(magnitude) & 0x7f800000u, all_of<BitsOf<F>>(smallest_normal));
  }
  // A power of two whose ulp is the small format's at that exponent: adding it rounds.
  template <typename U>
  static U rounder_of(U exponent) {
    return exponent + (exponent_shift << 23);
  }
};

struct E2M1 : SmallFloat<4, 1, 1, 6> {
  // Half-way from `max` to the value that would be next. Weights up to here lose no more with a
  // scale than with twice the scale.
  static constexpr float beyond = 7.0f;
};

struct E4M3 : SmallFloat<8, 3, 7, 448> {
  static constexpr float beyond = 464.0f;
  template <typename U>
  static constexpr FloatOf<U> decode(U code) {
    const auto nan = all_of<FloatOf<U>>(std::numeric_limits<float>::quiet_NaN());
    return (code & 0x7fu) == 0x7fu ? nan : SmallFloat::decode(code);
  }
};

// The upper byte of an F16: exponents of all ones are infinities and NaN.
struct E5M2 : SmallFloat<8, 2, 15, 57344> {
  template <typename U>
  static constexpr FloatOf<U> decode(U code) {
    const auto special = float_of(((code & 0x80u) << 24) | ((code & 3u) << 21) | 0x7f800000u);
    return (code & 0x7cu) == 0x7cu ? special : SmallFloat::decode(code);
  }
};

// 2^(bits - 127); 255 is NaN (section 5.4.1).
struct E8M0 {
  static constexpr unsigned bits = 8;
  // The smallest power of two that is >= value, its exponent clamped to [-127, 127]. Read off the
  // float's bits: a library's log2 may round 2^k * (1 + ulp) down to k.
  template <typename F>
  static BitsOf<F> encode(F value) {
    using U = BitsOf<F>;
    const U bits = bits_of(value);
    const U up = (bits + 0x7fffffu) >> 23;
    const U subnormal = bits > 0x400000u ? all_of<U>(1u) : all_of<U>(0u);  // 2^-127 is 0x400000
    return (bits >> 23) == 0u ? subnormal : min_of(up, all_of<U>(254u));
  }
  template <typename U>
  static constexpr FloatOf<U> decode(U bits) {
    using F = FloatOf<U>;
    const F power = bits == 0u ? all_of<F>(0x1p-127f) : float_of(bits << 23);
    return bits == 255u ? all_of<F>(std::numeric_limits<float>::quiet_NaN()) : power;
  }
};

template <typename Format>
inline constexpr auto values_of = [] {
  std::array<float, 1u << Format::bits> values{};
  for (std::uint32_t code = 0; code < values.size(); ++code) values[code] = Format::decode(code);
  return values;
}();

// Format::decode of clean codes; of a single one from a table, which needs no branches.
template <typename Format, typename U>
inline FloatOf<U> decoded(U code) {
  if constexpr (std::is_same_v<U, std::uint32_t>) {
    return values_of<Format>[code];
  } else {
    return Format::decode(code);
  }
}

}  // namespace blobstore::BLOBSTORE_TARGET
