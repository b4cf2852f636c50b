// Python bindings of the scanner and the writer: Python's objects from columns and back, nothing else is decided here.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "scan.h"
#include "write.h"

namespace nb = nanobind;
using namespace blobstore;

namespace {

nb::tuple entry_of(const Tensors& tensors, std::size_t index) {
  if (index >= tensors.entries.size()) throw nb::index_error();
  const Entry& found = tensors.entries[index];
  nb::object shape = nb::steal(PyTuple_New(found.rank));
  if (!shape) nb::raise_python_error();
  for (unsigned axis = 0; axis < found.rank; ++axis) {
    PyTuple_SET_ITEM(shape.ptr(), axis, nb::cast(tensors.dims[found.first_dim + axis]).release().ptr());
  }
  return nb::make_tuple(found.dtype, shape, found.begin, found.end);
}

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
  return nb::make_tuple(places, std::move(found->tensors), nb::bytes(found->metadata.data(), found->metadata.size()));
}

// Reads TensorEntry objects. Whatever is not just as header.py makes it is declined.
class EntryReader {
 public:
  explicit EntryReader(const nb::tuple& dtypes) : dtypes_(dtypes) {}

  bool read(nb::handle object, Tensors& tensors) const {
    Entry entry{};
    const nb::object dtype = object.attr(dtype_), shape = object.attr(shape_);
    if (!PyTuple_CheckExact(shape.ptr()) || nb::len(shape) > most_rank) return false;
    entry.first_dim = static_cast<std::uint32_t>(tensors.dims.size());
    entry.rank = static_cast<std::uint8_t>(nb::len(shape));
    for (unsigned axis = 0; axis < entry.rank; ++axis) {
      if (!whole(PyTuple_GET_ITEM(shape.ptr(), axis), tensors.dims.emplace_back())) return false;
    }
    while (entry.dtype < dtypes_.size() && !dtypes_[entry.dtype].is(dtype)) ++entry.dtype;
    if (entry.dtype == dtypes_.size() || !whole(object.attr(begin_), entry.begin) || !whole(object.attr(end_), entry.end)) {
      return false;
    }
    tensors.entries.push_back(entry);
    return tensors.fits(entry);
  }

 private:
  static bool whole(nb::handle object, std::uint64_t& value) {
    if (!PyLong_CheckExact(object.ptr())) return false;
    value = PyLong_AsUnsignedLongLong(object.ptr());
    if (value != UINT64_MAX || PyErr_Occurred() == nullptr) return true;
    PyErr_Clear();  // negative, or over 64 bits
    return false;
  }

  const nb::tuple& dtypes_;
  const nb::object dtype_ = nb::steal(PyUnicode_InternFromString("dtype")), shape_ = nb::steal(PyUnicode_InternFromString("shape")),
                   begin_ = nb::steal(PyUnicode_InternFromString("begin")), end_ = nb::steal(PyUnicode_InternFromString("end"));
};

// The JSON object of names and members, each a TensorEntry or bytes that are JSON already; None where it has to be looked at.
std::optional<nb::bytes> write_text(const nb::list& names, const nb::list& members, const nb::tuple& dtype_objects) {
  const EntryReader reader(dtype_objects);
  Tensors tensors;
  std::string out = "{";
  for (std::size_t place = 0; place < names.size(); ++place) {
    Py_ssize_t size = 0;
    const char* const name = PyUnicode_AsUTF8AndSize(nb::handle(names[place]).ptr(), &size);
    if (name == nullptr) {
      PyErr_Clear();  // half of a surrogate pair
      return {};
    }
    if (place > 0) out += ',';
    write_string(out, {name, static_cast<std::size_t>(size)});
    out += ':';
    const nb::handle member = members[place];
    if (nb::isinstance<nb::bytes>(member)) {
      out.append(nb::borrow<nb::bytes>(member).c_str(), nb::len(member));
    } else {
      if (!reader.read(member, tensors)) return {};
      write_entry(out, tensors, tensors.entries.back());
    }
  }
  out += '}';
  if (!tensors.cover({})) return {};
  return nb::bytes(out.data(), out.size());
}

nb::list dtype_names() {
  nb::list names;
  for (const DType& dtype : dtypes) names.append(nb::str(dtype.name.data(), dtype.name.size()));
  return names;
}

}  // namespace

NB_MODULE(_native, m) {
  nb::class_<Tensors>(m, "Tensors").def("entry", &entry_of, nb::arg("index"));
  m.def("scan", &scan_text, nb::arg("text"), nb::arg("data_size").none(), nb::arg("unescape"));
  m.def("write", &write_text, nb::arg("names"), nb::arg("members"), nb::arg("dtypes"));
  m.def("dtypes", &dtype_names);
}
