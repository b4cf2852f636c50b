// The kernels of one target; the file of the target includes it and defines its name and lanes.
#include "blocks.h"
#include "compare.h"
#include "dequantize.h"
#include "kernels.h"
#include "quantize.h"
#include "search_affine.h"
#include "search_fp.h"

namespace blobstore::BLOBSTORE_TARGET {

inline constexpr std::size_t N = BLOBSTORE_LANES;

// Calls block(first weight) for N finite groups at a time. As each_tile.
template <typename Float, unsigned bits, typename Scale, std::size_t lanes, typename Block>
std::size_t each_block(const QuantizeJob& job, std::size_t group_size, Block block) {
  const auto tile = [&](std::size_t start, std::size_t blocks) {
    const std::size_t size = lanes * group_size;
    if (!is_finite<Float>(weights_of<Float>(job) + start, blocks * size)) return false;
    for (std::size_t b = 0; b < blocks; ++b) block(start + b * size);
    return true;
  };
  return each_tile<Float, bits, Scale, lanes>(job, group_size, tile);
}

template <typename Float, unsigned bits, std::size_t lanes>
std::size_t search_affine(const QuantizeJob& job) {
  const auto block = [&](std::size_t start) {
    search_affine_block<Float, bits, lanes>(job, start);
  };
  using Scale = typename Float::Bits;
  const auto bad = each_block<Float, bits, Scale, lanes>(job, job.group_size, block);
  return bad == all_finite ? first_overflow<Float>(job) : bad;
}

template <typename Float, typename Type, std::size_t lanes>
std::size_t search_fp(const QuantizeJob& job) {
  const auto block = [&](std::size_t start) { search_fp_block<Float, Type, lanes>(job, start); };
  constexpr unsigned bits = Type::Code::bits;
  return each_block<Float, bits, std::uint8_t, lanes>(job, Type::group_size, block);
}

// Rows of the table: BF16, F16, F32.
#define FLOATS(function, ...) \
  {function<Bf16, __VA_ARGS__>, function<F16, __VA_ARGS__>, function<F32, __VA_ARGS__>}
#define EACH_TYPE(affine, fp) \
  {FLOATS(affine, 4, N), FLOATS(affine, 8, N), FLOATS(fp, Nvfp4, N), FLOATS(fp, Mxfp4, N), \
   FLOATS(fp, Mxfp8, N)}

}  // namespace blobstore::BLOBSTORE_TARGET

namespace blobstore {

// Before any code runs, because code of this file may use instructions that the processor lacks.
constinit const Target BLOBSTORE_TABLE = [] {
  using namespace BLOBSTORE_TARGET;
  return Target{
      BLOBSTORE_NAME,
      {EACH_TYPE(quantize_affine, quantize_fp), EACH_TYPE(search_affine, search_fp)},
      EACH_TYPE(dequantize_affine, dequantize_fp),
      {FLOATS(decode_blocks, E4M3, N), FLOATS(decode_blocks, E5M2, N),
       FLOATS(decode_blocks, Int8, N), FLOATS(decode_blocks, Table, N)},
      {dequantize_columns<Bf16>, dequantize_columns<F16>, dequantize_columns<F32>},
      {to_doubles<Bf16, N>, to_doubles<F16, N>, to_doubles<F32, N>, copy_doubles},
      add_pairs<N>,
#if BLOBSTORE_LANES == 1
      {limits_affine<4>, limits_affine<8>, limits_fp<Nvfp4>, limits_fp<Mxfp4>, limits_fp<Mxfp8>},
#else
      {},
#endif
  };
}();

}  // namespace blobstore
