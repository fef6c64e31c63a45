/* The functions of fskv._native for fskv.index; fskv/_native.pyi has their types. */
#ifndef FSKV_FILES_API_H
#define FSKV_FILES_API_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

PyObject *probe_chunks(PyObject *module, PyObject *args);
PyObject *stamp_file(PyObject *module, PyObject *args);

#endif
