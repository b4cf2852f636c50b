// Python bindings of the scanner: Python's objects from columns, nothing else is decided here.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "files.h"
#include "outline.h"
#include "scan.h"

namespace nb = nanobind;
using namespace blobstore;

namespace {

// A string of the text. Bytes that are not UTF-8 raise ValueError, as `unescape` does for half of a
// surrogate pair.
nb::object text_of(const String& found, const nb::callable& unescape) {
  if (found.escaped) return unescape(nb::bytes(found.raw.data() - 1, found.raw.size() + 2));
  const auto size = static_cast<Py_ssize_t>(found.raw.size());
  nb::object decoded = nb::steal(PyUnicode_DecodeUTF8(found.raw.data(), size, "strict"));
  if (!decoded) nb::raise_python_error();
  return decoded;
}

// (dtype's name, shape, begin, end) of one tensor.
nb::tuple fields_of(const Tensors& tensors, std::size_t index) {
  if (index >= tensors.entries.size()) throw nb::index_error();
  const Entry& found = tensors.entries[index];
  nb::list shape;
  for (unsigned axis = 0; axis < found.rank; ++axis) {
    shape.append(tensors.dims[found.first_dim + axis]);
  }
  return nb::make_tuple(dtypes[found.dtype].name.data(), nb::tuple(shape), found.begin, found.end);
}

// Names in the order of the text, each with its place in it.
nb::dict places_of(const std::pmr::vector<String>& names, const nb::callable& unescape) {
  nb::dict places;
  std::size_t place = 0;
  for (const String& name : names) places[text_of(name, unescape)] = place++;
  return places;
}

// The metadata, or None if a key stands there twice.
std::optional<nb::dict> metadata_of(std::string_view found, const nb::callable& unescape) {
  nb::dict metadata;
  std::size_t count = 0;
  each_pair(found, [&](const String& key, const String& value) {
    metadata[text_of(key, unescape)] = text_of(value, unescape);
    ++count;
  });
  if (metadata.size() != count) return {};
  return metadata;
}

// (names with their places, table, metadata), or None for a text whose strings are not accepted.
std::optional<nb::tuple> objects_of(Scan&& found, const nb::callable& unescape) {
  try {
    const nb::dict places = places_of(found.names, unescape);
    if (places.size() != found.names.size()) return {};  // two names are equal
    const std::optional<nb::dict> metadata = metadata_of(found.metadata, unescape);
    if (!metadata) return {};
    return nb::make_tuple(places, std::move(found.tensors), *metadata);
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_ValueError)) throw;
    return {};
  }
}

std::optional<nb::tuple> scan_text(const nb::bytes& text, std::optional<std::uint64_t> data_size,
                                   const nb::callable& unescape) {
  std::optional<Scan> found;
  {
    const std::string_view view(text.c_str(), text.size());
    const nb::gil_scoped_release unlocked;
    found = scan(view, data_size);
  }
  if (!found) return {};
  return objects_of(std::move(*found), unescape);
}

std::unique_ptr<FileHeaders> scan_files(
    int folder, const std::vector<std::pair<std::string, std::uint64_t>>& files) {
  const nb::gil_scoped_release unlocked;
  return std::make_unique<FileHeaders>(headers_in(folder, files));
}

// What `scan_text` gives for a file, and the length of the text; None where the file or its header
// is declined.
std::optional<nb::tuple> header_at(const FileHeaders& headers, std::size_t index,
                                   const nb::callable& unescape) {
  if (index >= headers.each.size()) throw nb::index_error();
  if (!headers.each[index]) return {};
  const std::optional<nb::tuple> found = objects_of(Scan(headers.each[index]->scan), unescape);
  if (!found) return {};
  return nb::make_tuple(*found, headers.each[index]->text.size());
}

// The bytes of all texts without padding, and the number of all tensors.
std::pair<std::size_t, std::size_t> totals_of(const FileHeaders& headers) {
  std::size_t nbytes = 0, tensors = 0;
  for (const FileHeader* const header : headers.each) {
    if (!header) continue;
    nbytes += header->unpadded();
    tensors += header->scan.names.size();
  }
  return {nbytes, tensors};
}

nb::str text_of(std::string_view ascii) { return nb::str(ascii.data(), ascii.size()); }

// (names, forms, keys, examples, counts): see `Outline`.
nb::tuple outline_at(const FileHeaders& headers) {
  Outline found;
  {
    const nb::gil_scoped_release unlocked;
    found = outline_of(headers);
  }
  nb::list keys, examples;
  const auto count = static_cast<Py_ssize_t>(found.names.size());
  const nb::list names = nb::steal<nb::list>(PyList_New(count));
  for (Py_ssize_t place = 0; place < count; ++place) {
    PyList_SET_ITEM(names.ptr(), place, text_of(found.names[place]).release().ptr());
  }
  for (const std::string& key : found.keys) keys.append(nb::bytes(key.data(), key.size()));
  for (const Example& one : found.examples) {
    examples.append(nb::make_tuple(one.file, text_of(one.name)));
  }
  return nb::make_tuple(names, found.forms, keys, examples, found.counts);
}

}  // namespace

NB_MODULE(_native, m) {
  nb::class_<Tensors>(m, "Tensors").def("fields", &fields_of, nb::arg("index"));
  m.def("scan", &scan_text, nb::arg("text"), nb::arg("data_size").none(), nb::arg("unescape"));
  nb::class_<FileHeaders>(m, "FileHeaders")
      .def("__len__", [](const FileHeaders& headers) { return headers.each.size(); })
      .def("header", &header_at, nb::arg("index"), nb::arg("unescape"))
      .def("totals", &totals_of)
      .def("outline", &outline_at);
  m.def("scan_files", &scan_files, nb::arg("folder"), nb::arg("files"));
}
