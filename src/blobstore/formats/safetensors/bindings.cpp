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

// The fields of header.py's TensorEntry; they live as long as the process.
struct Fields {
  PyObject* const dtype = PyUnicode_InternFromString("dtype");
  PyObject* const shape = PyUnicode_InternFromString("shape");
  PyObject* const begin = PyUnicode_InternFromString("begin");
  PyObject* const end = PyUnicode_InternFromString("end");
};
const Fields& fields() {
  static const Fields names;
  return names;
}

// A TensorEntry, made as its own constructor makes it: a frozen dataclass sets its fields by object.__setattr__ too.
nb::object entry_of(const Tensors& tensors, std::size_t index, const nb::type_object& entry_type,
                    const nb::tuple& dtype_objects) {
  if (index >= tensors.entries.size()) throw nb::index_error();
  const Entry& found = tensors.entries[index];
  nb::object shape = nb::steal(PyTuple_New(found.rank));
  if (!shape) nb::raise_python_error();
  for (unsigned axis = 0; axis < found.rank; ++axis) {
    PyTuple_SET_ITEM(shape.ptr(), axis, nb::cast(tensors.dims[found.first_dim + axis]).release().ptr());
  }
  auto* const type = reinterpret_cast<PyTypeObject*>(entry_type.ptr());
  nb::object made = nb::steal(type->tp_new(type, nb::tuple().ptr(), nullptr));
  if (!made) nb::raise_python_error();
  const auto set = [&](PyObject* field, nb::handle value) {
    if (PyObject_GenericSetAttr(made.ptr(), field, value.ptr()) != 0) nb::raise_python_error();
  };
  set(fields().dtype, dtype_objects[found.dtype]);
  set(fields().shape, shape);
  set(fields().begin, nb::cast(found.begin));
  set(fields().end, nb::cast(found.end));
  return made;
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
std::optional<nb::tuple> scan_text(const nb::bytes& text, std::optional<std::uint64_t> data_size,
                                   const nb::callable& unescape) {
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

bool whole(const nb::object& object, std::uint64_t& value) {
  if (!PyLong_CheckExact(object.ptr())) return false;
  value = PyLong_AsUnsignedLongLong(object.ptr());
  if (value != UINT64_MAX || PyErr_Occurred() == nullptr) return true;
  PyErr_Clear();  // negative, or over 64 bits
  return false;
}

nb::object field_of(nb::handle object, PyObject* field) {
  nb::object value = nb::steal(PyObject_GetAttr(object.ptr(), field));
  if (!value) nb::raise_python_error();
  return value;
}

// Reads a TensorEntry; whatever is not just as `entry_of` makes it is declined.
bool read_entry(nb::handle object, const nb::tuple& dtype_objects, Tensors& tensors) {
  const nb::object dtype = field_of(object, fields().dtype), shape = field_of(object, fields().shape);
  if (!PyTuple_CheckExact(shape.ptr()) || nb::len(shape) > most_rank) return false;
  Entry entry{};
  entry.first_dim = static_cast<std::uint32_t>(tensors.dims.size());
  entry.rank = static_cast<std::uint8_t>(nb::len(shape));
  for (unsigned axis = 0; axis < entry.rank; ++axis) {
    if (!whole(nb::borrow(PyTuple_GET_ITEM(shape.ptr(), axis)), tensors.dims.emplace_back())) return false;
  }
  while (entry.dtype < dtype_objects.size() && !dtype_objects[entry.dtype].is(dtype)) ++entry.dtype;
  if (entry.dtype == dtype_objects.size()) return false;
  if (!whole(field_of(object, fields().begin), entry.begin)) return false;
  if (!whole(field_of(object, fields().end), entry.end)) return false;
  tensors.entries.push_back(entry);
  return tensors.fits(entry);
}

// The JSON object of names and members, each a TensorEntry or bytes that are JSON already; None for what the twin has to see.
std::optional<nb::bytes> write_text(const nb::list& names, const nb::list& members, const nb::tuple& dtype_objects) {
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
      if (!read_entry(member, dtype_objects, tensors)) return {};
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
  nb::class_<Tensors>(m, "Tensors").def("entry", &entry_of, nb::arg("index"), nb::arg("entry_type"), nb::arg("dtypes"));
  m.def("scan", &scan_text, nb::arg("text"), nb::arg("data_size").none(), nb::arg("unescape"));
  m.def("write", &write_text, nb::arg("names"), nb::arg("members"), nb::arg("dtypes"));
  m.def("dtypes", &dtype_names);
}
