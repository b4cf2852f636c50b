// Dequantize whole groups to float weights of any format: each operation is rounded to float32, the result to the format.
#pragma once

#include "groups.h"
#include "units.h"

namespace blobstore::BLOBSTORE_TARGET {

// code * scale + bias, as two rounded operations; count values into out. Scales and biases are stored as Float.
template <typename Float, typename Out, unsigned bits, std::size_t N>
void dequantize_affine(const std::byte* codes, const typename Float::Bits* scales, const typename Float::Bits* biases,
                       std::size_t count, std::size_t group_size, typename Out::Bits* out) {
  using F = typename Lanes<N>::F;
  using U = typename Lanes<N>::U;
  for (std::size_t group = 0; group < count / group_size; ++group) {
    const float scale = Float::decode(std::uint32_t{scales[group]});
    const float bias = Float::decode(std::uint32_t{biases[group]});
    for (std::size_t i = group * group_size; i < (group + 1) * group_size; i += Unit<N>::size) {
      U even, odd;
      load_codes<bits, N>(codes + i * bits / 8, even, odd);
      const F even_product = whole_numbers<N>(even) * scale;
      const F odd_product = whole_numbers<N>(odd) * scale;
      store_unit<Out, N>(out + i, {even_product + bias, odd_product + bias});
    }
  }
}

// code * scale * global_scale, from the left (the first product is exact); count values into out.
template <typename Type, typename Out, std::size_t most_lanes>
void dequantize_fp(const std::byte* codes, const std::uint8_t* scales, float global_scale, std::size_t count,
                   typename Out::Bits* out) {
  constexpr std::size_t N = most_lanes < Type::group_size / 2 ? most_lanes : Type::group_size / 2;
  using Code = typename Type::Code;
  using F = typename Lanes<N>::F;
  using U = typename Lanes<N>::U;
  for (std::size_t group = 0; group < count / Type::group_size; ++group) {
    const float scale = Type::Scale::decode(std::uint32_t{scales[group]});
    const std::size_t start = group * Type::group_size;
    for (std::size_t i = start; i < start + Type::group_size; i += Unit<N>::size) {
      U even, odd;
      load_codes<Code::bits, N>(codes + i * Code::bits / 8, even, odd);
      const F even_product = Code::decode(even) * scale;
      const F odd_product = Code::decode(odd) * scale;
      store_unit<Out, N>(out + i, {even_product * global_scale, odd_product * global_scale});
    }
  }
}

}  // namespace blobstore::BLOBSTORE_TARGET
