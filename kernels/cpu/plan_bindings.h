#pragma once

#include <pybind11/pybind11.h>

namespace fusedcomm {

void bind_plans(pybind11::module_& m);

}  // namespace fusedcomm
