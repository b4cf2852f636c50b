#pragma once

#include <nanobind/nanobind.h>

namespace blobstore {

void bind_manifests(nanobind::module_& module);

}  // namespace blobstore
