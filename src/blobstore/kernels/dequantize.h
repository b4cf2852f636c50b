// Dequantize whole groups to float weights of any format: each operation is rounded to float32, the
// result to the format.
#pragma once

#include <algorithm>

#include "groups.h"
#include "kernels.h"
#include "units.h"

namespace blobstore::BLOBSTORE_TARGET {

// Stores value(codes) for all codes of a group, N even and N odd ones at a time.
template <typename Out, unsigned bits, std::size_t N, typename Value>
inline void decode_group(const DequantizeJob& job, std::size_t start, std::size_t group_size,
                         Value value) {
  auto* const out = static_cast<typename Out::Bits*>(job.out);
  for (std::size_t i = start; i < start + group_size; i += Unit<N>::size) {
    Words<N> even, odd;
    load_codes<bits, N>(job.codes + i * bits / 8, even, odd);
    store_unit<Out, N>(out + i, {value(even), value(odd)});
  }
}

template <typename Float>
inline void decode_floats(const void* from, std::size_t first, std::size_t count, float* to) {
  const auto* const bits = static_cast<const typename Float::Bits*>(from) + first;
  for (std::size_t i = 0; i < count; ++i) to[i] = Float::decode(std::uint32_t{bits[i]});
}

// The scales and biases of the groups from `first` on, tile_groups at most.
struct AffineTile {
  std::size_t count;
  float scale[tile_groups], bias[tile_groups];

  [[gnu::noinline]] AffineTile(const DequantizeJob& job, std::size_t first)
      : count(std::min(tile_groups, job.count / job.group_size - first)) {
    const auto decode = job.scale_type == bf16  ? decode_floats<Bf16>
                        : job.scale_type == f16 ? decode_floats<F16>
                                                : decode_floats<F32>;
    decode(job.scales, first, count, scale);
    decode(job.biases, first, count, bias);
  }
};

// code * scale + bias, as two rounded operations.
template <typename Out, unsigned bits, std::size_t N>
void dequantize_affine(const DequantizeJob& given) {
  const DequantizeJob job = given;  // a copy, which storing values can't change
  for (std::size_t group = 0; group < job.count / job.group_size;) {
    const AffineTile tile(job, group);
    for (std::size_t i = 0; i < tile.count; ++i, ++group) {
      const auto value = [scale = tile.scale[i], bias = tile.bias[i]](Words<N> codes) {
        const Floats<N> product = whole_numbers<N>(codes) * scale;
        return product + bias;
      };
      decode_group<Out, bits, N>(job, group * job.group_size, job.group_size, value);
    }
  }
}

// code * scale * global_scale, from the left (the first product is exact).
template <typename Out, typename Type, std::size_t most_lanes>
void dequantize_fp(const DequantizeJob& given) {
  const DequantizeJob job = given;
  constexpr std::size_t N = lanes_for<Type, most_lanes>;
  const auto* const scales = static_cast<const std::uint8_t*>(job.scales);
  for (std::size_t group = 0; group < job.count / Type::group_size; ++group) {
    const float scale = decoded<typename Type::Scale>(std::uint32_t{scales[group]});
    const auto value = [scale, factor = job.global_scale](Words<N> codes) {
      const Floats<N> product = decoded<typename Type::Code>(codes) * scale;
      return product * factor;
    };
    const std::size_t start = group * Type::group_size;
    decode_group<Out, Type::Code::bits, N>(job, start, Type::group_size, value);
  }
}

// (code - zero) * scale, or code * scale + bias, of bytes whose columns are in any groups.
template <typename Out>
void dequantize_columns(const ColumnsJob& job) {
  auto* out = static_cast<typename Out::Bits*>(job.out);
  for (std::size_t row = 0; row < job.rows; ++row) {
    for (std::size_t i = 0; i < job.cols; ++i) {
      const std::size_t group = row * job.groups + job.group_of[i];
      const float code = job.codes[row * job.stride + i];
      const float scale = job.scales[group], bias = job.biases[group];
      const float value = job.by_zero ? (code - bias) * scale : code * scale + bias;
      *out++ = static_cast<typename Out::Bits>(Out::encode(value));
    }
  }
}

}  // namespace blobstore::BLOBSTORE_TARGET
