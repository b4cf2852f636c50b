// Python bindings of quantize.h: shapes and types are checked here, arithmetic is not done here.
//
// Weights, scales and biases cross as arrays of their bit patterns (uint16 for BF16 and F16, uint32 for F32), because
// numpy has no BF16 of its own. The interpreter lock is released while a kernel runs.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string_view.h>

#include <stdexcept>
#include <string_view>

#include "quantize.h"

namespace nb = nanobind;
using namespace blobstore;

namespace {

template <typename T>
using In = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Out = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

// -1 for "all finite": an index that Python can compare.
std::int64_t as_index(std::size_t bad) { return bad == all_finite ? -1 : static_cast<std::int64_t>(bad); }

void require_sizes(std::size_t count, std::size_t words, std::size_t scales, std::size_t bits, std::size_t group_size) {
  require(group_size > 0 && group_size % (32 / bits) == 0, "group_size is not a whole number of words");
  require(count % group_size == 0, "weights are not a whole number of groups");
  require(words == count / (32 / bits), "words has the wrong length");
  require(scales == count / group_size, "scales has the wrong length");
}

template <typename Float>
std::int64_t quantize_affine_as(In<typename Float::Bits> weights, unsigned bits, std::size_t group_size,
                                Out<std::uint32_t> words, Out<typename Float::Bits> scales,
                                Out<typename Float::Bits> biases) {
  require(bits == 4 || bits == 8, "bits is neither 4 nor 8");
  require_sizes(weights.size(), words.size(), scales.size(), bits, group_size);
  require(biases.size() == scales.size(), "biases has the wrong length");
  const nb::gil_scoped_release unlocked;
  const auto kernel = bits == 4 ? quantize_affine<Float, 4> : quantize_affine<Float, 8>;
  return as_index(kernel(weights.data(), weights.size(), group_size, words.data(), scales.data(), biases.data()));
}

template <typename Float>
std::int64_t quantize_fp_as(In<typename Float::Bits> weights, std::string_view quant_type, Out<std::uint32_t> words,
                            Out<std::uint8_t> scales) {
  const bool nv = quant_type == "nvfp4";
  const bool mx8 = quant_type == "mxfp8";
  require(nv || mx8 || quant_type == "mxfp4", "unknown type");
  require_sizes(weights.size(), words.size(), scales.size(), mx8 ? 8 : 4, nv ? 16 : 32);
  const nb::gil_scoped_release unlocked;
  const auto kernel = nv    ? quantize_fp<Float, E2M1, E4M3Scale, 16>
                      : mx8 ? quantize_fp<Float, E4M3, PowerOfTwoScale, 32>
                            : quantize_fp<Float, E2M1, PowerOfTwoScale, 32>;
  return as_index(kernel(weights.data(), weights.size(), words.data(), scales.data()));
}

template <typename Float>
void dequantize_affine_as(In<std::uint32_t> words, In<typename Float::Bits> scales, In<typename Float::Bits> biases,
                          unsigned bits, std::size_t group_size, Out<float> out) {
  require(bits == 4 || bits == 8, "bits is neither 4 nor 8");
  require_sizes(out.size(), words.size(), scales.size(), bits, group_size);
  require(biases.size() == scales.size(), "biases has the wrong length");
  const nb::gil_scoped_release unlocked;
  const auto kernel = bits == 4 ? dequantize_affine<Float, 4> : dequantize_affine<Float, 8>;
  kernel(words.data(), scales.data(), biases.data(), out.size(), group_size, out.data());
}

void dequantize_fp_as(In<std::uint32_t> words, In<std::uint8_t> scales, std::string_view quant_type, float global_scale,
                      Out<float> out) {
  const bool nv = quant_type == "nvfp4";
  const bool mx8 = quant_type == "mxfp8";
  require(nv || mx8 || quant_type == "mxfp4", "unknown type");
  require_sizes(out.size(), words.size(), scales.size(), mx8 ? 8 : 4, nv ? 16 : 32);
  const nb::gil_scoped_release unlocked;
  const auto kernel = nv    ? dequantize_fp<E2M1, E4M3Scale, 16>
                      : mx8 ? dequantize_fp<E4M3, PowerOfTwoScale, 32>
                            : dequantize_fp<E2M1, PowerOfTwoScale, 32>;
  kernel(words.data(), scales.data(), global_scale, out.size(), out.data());
}

template <typename Float>
void bind_float(nb::module_& m, const char* quantize_affine, const char* quantize_fp, const char* dequantize_affine) {
  m.def(quantize_affine, &quantize_affine_as<Float>, nb::arg("weights").noconvert(), nb::arg("bits"), nb::arg("group_size"),
        nb::arg("words").noconvert(), nb::arg("scales").noconvert(), nb::arg("biases").noconvert());
  m.def(quantize_fp, &quantize_fp_as<Float>, nb::arg("weights").noconvert(), nb::arg("quant_type"), nb::arg("words").noconvert(),
        nb::arg("scales").noconvert());
  m.def(dequantize_affine, &dequantize_affine_as<Float>, nb::arg("words").noconvert(), nb::arg("scales").noconvert(),
        nb::arg("biases").noconvert(), nb::arg("bits"), nb::arg("group_size"), nb::arg("out").noconvert());
}

}  // namespace

NB_MODULE(_native, m) {
  bind_float<Bf16>(m, "quantize_affine_bf16", "quantize_fp_bf16", "dequantize_affine_bf16");
  bind_float<F16>(m, "quantize_affine_f16", "quantize_fp_f16", "dequantize_affine_f16");
  bind_float<F32>(m, "quantize_affine_f32", "quantize_fp_f32", "dequantize_affine_f32");
  m.def("dequantize_fp", &dequantize_fp_as, nb::arg("words").noconvert(), nb::arg("scales").noconvert(), nb::arg("quant_type"),
        nb::arg("global_scale"), nb::arg("out").noconvert());
}
