// Writes several parts of files in one call. The interpreter lock is released once for all of them:
// where many threads work, each time that it is taken again costs more than a small write.
#include <nanobind/nanobind.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <vector>

namespace nb = nanobind;

namespace {

constexpr std::size_t most_at_once = std::size_t{1} << 30;  // macOS takes less than 2 GiB a call

// Bytes that are to be written at an offset of a file.
class Part {
 public:
  Part(int fd, off_t offset, nb::handle bytes) : fd_(fd), offset_(offset) {
    if (PyObject_GetBuffer(bytes.ptr(), &view_, PyBUF_SIMPLE) != 0) throw nb::python_error();
  }
  Part(Part&& other) noexcept
      : fd_(other.fd_), offset_(other.offset_), written_(other.written_), view_(other.view_) {
    other.view_.obj = nullptr;
  }
  Part(const Part&) = delete;
  Part& operator=(const Part&) = delete;
  Part& operator=(Part&&) = delete;
  ~Part() { PyBuffer_Release(&view_); }  // does nothing if it has no object

  // Writes what is left. Returns 0, or the number of an error; after EINTR it can go on.
  int write() {
    const auto size = static_cast<std::size_t>(view_.len);
    while (written_ < size) {
      const char* const from = static_cast<const char*>(view_.buf) + written_;
      const std::size_t count = std::min(size - written_, most_at_once);
      const ssize_t done = pwrite(fd_, from, count, offset_ + static_cast<off_t>(written_));
      if (done <= 0) return done < 0 ? errno : EIO;
      written_ += static_cast<std::size_t>(done);
    }
    return 0;
  }

 private:
  int fd_;
  off_t offset_;
  std::size_t written_ = 0;
  Py_buffer view_;
};

int write_all(std::vector<Part>& parts) {
  const nb::gil_scoped_release unlocked;
  for (Part& part : parts) {
    if (const int error = part.write(); error != 0) return error;
  }
  return 0;
}

void write_parts(const nb::sequence& given) {
  std::vector<Part> parts;
  for (const nb::handle part : given) {
    const nb::tuple fields = nb::cast<nb::tuple>(part);
    if (fields.size() != 3) throw nb::value_error("a part is (file, offset, bytes)");
    parts.emplace_back(nb::cast<int>(fields[0]), nb::cast<long long>(fields[1]), fields[2]);
  }
  int error;
  while ((error = write_all(parts)) == EINTR) {
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
  if (error != 0) {
    errno = error;
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
  }
}

}  // namespace

NB_MODULE(_native, module) {
  nb::set_leak_warnings(false);
  module.def("write_parts", &write_parts, nb::arg("parts"));
}
