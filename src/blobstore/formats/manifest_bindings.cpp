// Python bindings of the scanner of manifests: descriptors of scanned layers.
#include "manifest_bindings.h"

#include <nanobind/stl/optional.h>

#include <optional>
#include <string_view>

#include "manifest.h"
#include "python_text.h"

namespace nb = nanobind;

namespace blobstore {

namespace {

constexpr Py_ssize_t most_kind = 255;  // characters of a media type, as in documents.py

// An object of a class whose instances are frozen: it is made, and its fields are set, below its
// `__init__`, whose checks the scanner has done.
class Made {
 public:
  explicit Made(nb::handle type) {
    auto* const made = reinterpret_cast<PyTypeObject*>(type.ptr());
    object_ = nb::steal(PyType_GenericAlloc(made, 0));
    if (!object_) nb::raise_python_error();
  }

  Made& with(const nb::str& field, nb::handle value) {
    if (PyObject_GenericSetAttr(object_.ptr(), field.ptr(), value.ptr()) != 0) {
      nb::raise_python_error();
    }
    return *this;
  }

  nb::object get() const { return object_; }

 private:
  nb::object object_;
};

// Makes the objects of one manifest.
class Descriptors {
 public:
  Descriptors(nb::handle descriptor, nb::handle digest, const nb::callable& unescape)
      : descriptor_(descriptor), digest_(digest), unescape_(unescape) {}

  // None for a media type that is too long.
  std::optional<nb::object> of(const Layer& layer) {
    const nb::object kind = media_type(layer.media_type);
    if (PyUnicode_GetLength(kind.ptr()) > most_kind) return {};
    const nb::str hex(layer.hex.data(), layer.hex.size());
    const nb::object digest = Made(digest_).with(hex_, hex).get();
    return Made(descriptor_)
        .with(media_type_, kind)
        .with(digest_name_, digest)
        .with(size_, nb::int_(layer.size))
        .with(source_, text_or_none(layer.source))
        .with(name_, text_or_none(layer.name))
        .get();
  }

 private:
  // Most layers have the media type of the one before.
  nb::object media_type(const String& found) {
    if (!last_kind_ || found.raw != last_raw_) {
      last_kind_ = text_of(found, unescape_);
      last_raw_ = found.raw;
    }
    return last_kind_;
  }

  nb::object text_or_none(const std::optional<String>& found) const {
    return found ? text_of(*found, unescape_) : nb::none();
  }

  const nb::handle descriptor_, digest_;
  const nb::callable& unescape_;
  const nb::str hex_{"hex"}, media_type_{"media_type"}, digest_name_{"digest"}, size_{"size"},
      source_{"source"}, name_{"name"};
  nb::object last_kind_;
  std::string_view last_raw_;
};

// (descriptors, the text with an empty array of layers), or None where it is declined.
std::optional<nb::tuple> scan_manifest(const nb::bytes& text, nb::handle descriptor,
                                       nb::handle digest, const nb::callable& unescape) {
  const std::string_view view(text.c_str(), text.size());
  std::optional<LayerScan> found;
  {
    const nb::gil_scoped_release unlocked;
    found = scan_layers(view);
  }
  if (!found) return {};
  Descriptors descriptors(descriptor, digest, unescape);
  nb::list layers;
  try {
    for (const Layer& layer : found->layers) {
      const std::optional<nb::object> made = descriptors.of(layer);
      if (!made) return {};
      layers.append(*made);
    }
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_ValueError)) throw;
    return {};
  }
  std::string rest(view.substr(0, found->begin));
  rest.append("[]").append(view.substr(found->end));
  return nb::make_tuple(nb::tuple(layers), nb::bytes(rest.data(), rest.size()));
}

}  // namespace

void bind_manifests(nb::module_& module) {
  module.def("scan_manifest", &scan_manifest, nb::arg("text"), nb::arg("descriptor"),
             nb::arg("digest"), nb::arg("unescape"));
}

}  // namespace blobstore
