// Python bindings of the scanner: names become Python strings here, nothing else is decided.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

#include "scan.h"

namespace nb = nanobind;
using namespace blobstore;

namespace {

struct Table {
  std::vector<Entry> entries;
  std::vector<std::uint64_t> dims;

  nb::tuple entry(std::size_t index) const {
    if (index >= entries.size()) throw nb::index_error();
    const Entry& found = entries[index];
    nb::object shape = nb::steal(PyTuple_New(found.rank));
    if (!shape) nb::raise_python_error();
    for (unsigned axis = 0; axis < found.rank; ++axis) {
      PyTuple_SET_ITEM(shape.ptr(), axis, nb::cast(dims[found.first_dim + axis]).release().ptr());
    }
    return nb::make_tuple(found.dtype, shape, found.begin, found.end);
  }
};

// The name of a tensor. Bytes that are no UTF-8 raise ValueError, and so does `unescape` for what is no string.
nb::object name_of(const String& name, const nb::callable& unescape) {
  const auto size = static_cast<Py_ssize_t>(name.raw.size());
  if (name.escaped) return unescape(nb::bytes(name.raw.data() - 1, name.raw.size() + 2));
  return nb::steal(PyUnicode_DecodeUTF8(name.raw.data(), size, "strict"));
}

// Names in the order of the text, each with its place in it.
nb::dict places_of(const std::vector<String>& names, const nb::callable& unescape) {
  nb::dict places;
  std::size_t place = 0;
  for (const String& raw : names) {
    const nb::object name = name_of(raw, unescape);
    if (!name) nb::raise_python_error();
    places[name] = place++;
  }
  return places;
}

// (names with their places, table, the metadata's JSON), or None for a text that is not accepted.
std::optional<nb::tuple> scan_text(const nb::bytes& text, std::optional<std::uint64_t> data_size, const nb::callable& unescape) {
  std::optional<Scan> found;
  {
    const std::string_view view(text.c_str(), text.size());
    const nb::gil_scoped_release unlocked;
    found = scan(view, data_size);
  }
  if (!found) return {};
  const nb::dict places = places_of(found->names, unescape);
  if (places.size() != found->names.size()) return {};  // a name is there twice
  Table table{std::move(found->entries), std::move(found->dims)};
  return nb::make_tuple(places, std::move(table), nb::bytes(found->metadata.data(), found->metadata.size()));
}

nb::list dtype_names() {
  nb::list names;
  for (const DType& dtype : dtypes) names.append(nb::str(dtype.name.data(), dtype.name.size()));
  return names;
}

}  // namespace

NB_MODULE(_scan, m) {
  nb::class_<Table>(m, "Table").def("entry", &Table::entry, nb::arg("index"));
  m.def("scan", &scan_text, nb::arg("text"), nb::arg("data_size").none(), nb::arg("unescape"));
  m.def("dtypes", &dtype_names);
}
