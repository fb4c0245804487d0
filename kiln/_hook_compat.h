/* Every difference between CPython 3.11, 3.12 and 3.13 that the hook depends on. */
#ifndef KILN_HOOK_COMPAT_H
#define KILN_HOOK_COMPAT_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <stddef.h>
#include <stdint.h>
#include <stdbool.h>
#include <string.h>

#if PY_VERSION_HEX < 0x030B0000 || PY_VERSION_HEX >= 0x030E0000
#error "kiln._hook knows CPython 3.11, 3.12 and 3.13"
#endif
#ifdef Py_GIL_DISABLED
#error "kiln._hook needs the GIL"
#endif

/* The namespace of a class: a borrowed reference. */
static inline PyObject *type_dict(PyTypeObject *type)
{
#if PY_VERSION_HEX >= 0x030C0000
    PyObject *dict = PyType_GetDict(type);
    Py_XDECREF(dict); /* the type keeps it */
    return dict;
#else
    return type->tp_dict;
#endif
}

#endif
