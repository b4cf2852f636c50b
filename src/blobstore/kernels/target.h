// The kernels of one target: included by the file of the target, which says its name, its lanes and when it runs.
#include "blocks.h"
#include "dequantize.h"
#include "kernels.h"
#include "quantize.h"
#include "search_affine.h"
#include "search_fp.h"

namespace blobstore::BLOBSTORE_TARGET {

inline constexpr std::size_t N = BLOBSTORE_LANES;

template <typename Float>
const typename Float::Bits* weights_of(const QuantizeJob& job) {
  return static_cast<const typename Float::Bits*>(job.weights);
}

template <typename Float, unsigned bits>
std::size_t minmax_affine(const QuantizeJob& job) {
  using Bits = typename Float::Bits;
  return quantize_affine<Float, bits, N>(weights_of<Float>(job), job.count, job.group_size, job.codes,
                                         static_cast<Bits*>(job.scales), static_cast<Bits*>(job.biases));
}

template <typename Float, typename Type>
std::size_t minmax_fp(const QuantizeJob& job) {
  return quantize_fp<Float, Type, N>(weights_of<Float>(job), job.count, 1.0f / job.global_scale, job.codes,
                                     static_cast<std::uint8_t*>(job.scales));
}

// Calls block(lanes, first weight) for N finite groups at a time, and for single ones at the end.
template <typename Float, typename Block>
std::size_t each_block(const QuantizeJob& job, std::size_t group_size, Block block) {
  const auto* weights = weights_of<Float>(job);
  return each_tile<Float, N>(weights, job.count, group_size, [&](auto lanes, std::size_t start, std::size_t blocks) {
    const std::size_t size = decltype(lanes)::count * group_size;
    if (!is_finite<Float>(weights + start, blocks * size)) return false;
    for (std::size_t b = 0; b < blocks; ++b) block(lanes, start + b * size);
    return true;
  });
}

template <typename Float, unsigned bits>
std::size_t search_affine(const QuantizeJob& job) {
  using Bits = typename Float::Bits;
  return each_block<Float>(job, job.group_size, [&](auto lanes, std::size_t start) {
    const std::size_t group = start / job.group_size;
    search_affine_block<Float, bits, decltype(lanes)::count>(job, start, job.codes + start * bits / 8,
                                                             static_cast<Bits*>(job.scales) + group,
                                                             static_cast<Bits*>(job.biases) + group);
  });
}

template <typename Float, typename Type>
std::size_t search_fp(const QuantizeJob& job) {
  return each_block<Float>(job, Type::group_size, [&](auto lanes, std::size_t start) {
    search_fp_block<Float, Type, decltype(lanes)::count>(job, start, job.codes + start * Type::Code::bits / 8,
                                                         static_cast<std::uint8_t*>(job.scales) + start / Type::group_size);
  });
}

template <typename Float, typename Out, unsigned bits>
void affine_to(const DequantizeJob& job) {
  using Bits = typename Float::Bits;
  dequantize_affine<Float, Out, bits, N>(job.codes, static_cast<const Bits*>(job.scales),
                                         static_cast<const Bits*>(job.biases), job.count, job.group_size,
                                         static_cast<typename Out::Bits*>(job.out));
}

template <typename Type, typename Out>
void fp_to(const DequantizeJob& job) {
  dequantize_fp<Type, Out, N>(job.codes, static_cast<const std::uint8_t*>(job.scales), job.global_scale, job.count,
                              static_cast<typename Out::Bits*>(job.out));
}

// Rows of the table: BF16, F16, F32.
#define FLOATS(function, ...) {function<Bf16, __VA_ARGS__>, function<F16, __VA_ARGS__>, function<F32, __VA_ARGS__>}
#define AFFINE_TO(bits)                                                                                   \
  {                                                                                                       \
    {affine_to<Bf16, Bf16, bits>, affine_to<Bf16, F16, bits>, affine_to<Bf16, F32, bits>},                \
        {affine_to<F16, Bf16, bits>, affine_to<F16, F16, bits>, affine_to<F16, F32, bits>},               \
        {affine_to<F32, Bf16, bits>, affine_to<F32, F16, bits>, affine_to<F32, F32, bits>},               \
  }
#define FP_TO(Type) {{fp_to<Type, Bf16>, fp_to<Type, F16>, fp_to<Type, F32>}}

}  // namespace blobstore::BLOBSTORE_TARGET

namespace blobstore {


// Before any code runs, because code of this file may be more than the processor knows.
constinit const Target BLOBSTORE_TABLE = [] {
  using namespace BLOBSTORE_TARGET;
  return Target{
      BLOBSTORE_NAME,
      {{FLOATS(minmax_affine, 4), FLOATS(minmax_affine, 8), FLOATS(minmax_fp, Nvfp4), FLOATS(minmax_fp, Mxfp4),
        FLOATS(minmax_fp, Mxfp8)},
       {FLOATS(search_affine, 4), FLOATS(search_affine, 8), FLOATS(search_fp, Nvfp4), FLOATS(search_fp, Mxfp4),
        FLOATS(search_fp, Mxfp8)}},
      {AFFINE_TO(4), AFFINE_TO(8), FP_TO(Nvfp4), FP_TO(Mxfp4), FP_TO(Mxfp8)},
      FLOATS(decode_blocks, N),
  };
}();

}  // namespace blobstore
