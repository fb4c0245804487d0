/* An epoch that changes whenever an object may have got another class or another instance dict.

   Neither leaves a trace in any dict. But Python code can do both only through two setters of CPython's: that of
   `object.__class__`, and that of the `__dict__` which a class statement adds to a class without one. Each setter stands in
   a static table that descriptors point to; there they are replaced by functions that count and then call them. C code
   that writes `ob_type` or a dict's slot itself is not seen; of the dicts that C types bring along (functools.partial,
   exceptions), whose code may do so, each slot is compared in every call. */
#ifndef KILN_HOOK_EXCHANGE_H
#define KILN_HOOK_EXCHANGE_H

#include "_hook_compat.h"
#include <link.h>

static uint64_t exchange_count = 1;
static setter class_setter, dict_setter; /* CPython's own; NULL where its table cannot be written */

static inline uint64_t exchange_epoch(void)
{
    return __atomic_load_n(&exchange_count, __ATOMIC_RELAXED);
}

/* Guards may be checked while a setter runs, before its change (audit hooks) and after (finalizers): counts twice. */
static int exchange(setter original, PyObject *object, PyObject *value, void *closure)
{
    __atomic_fetch_add(&exchange_count, 1, __ATOMIC_RELAXED);
    int result = original(object, value, closure);
    __atomic_fetch_add(&exchange_count, 1, __ATOMIC_RELAXED);
    return result;
}

static int exchange_class(PyObject *object, PyObject *value, void *closure)
{
    return exchange(class_setter, object, value, closure);
}

static int exchange_dict(PyObject *object, PyObject *value, void *closure)
{
    return exchange(dict_setter, object, value, closure);
}

/* The table's row behind an attribute that the class itself defines, or NULL. */
static PyGetSetDef *own_getset(PyTypeObject *type, const char *name)
{
    PyObject *dict = type_dict(type), *descriptor = dict == NULL ? NULL : PyDict_GetItemString(dict, name);
    return descriptor != NULL && Py_TYPE(descriptor) == &PyGetSetDescr_Type
               ? ((PyGetSetDescrObject *)descriptor)->d_getset
               : NULL;
}

typedef struct {
    uintptr_t at;
    bool writable;
} Place;

static int find_segment(struct dl_phdr_info *info, size_t size, void *argument)
{
    Place *place = argument;
    bool here = false, locked = false;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        uintptr_t start = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr, end = start + info->dlpi_phdr[i].p_memsz;
        if (place->at < start || place->at >= end)
            continue;
        here |= info->dlpi_phdr[i].p_type == PT_LOAD && info->dlpi_phdr[i].p_flags & PF_W;
        locked |= info->dlpi_phdr[i].p_type == PT_GNU_RELRO;
    }
    place->writable = here && !locked;
    return here;
}

static bool is_writable(const void *at)
{
    Place place = {(uintptr_t)at, false};
    dl_iterate_phdr(find_segment, &place);
    return place.writable;
}

/* Puts `ours` before the setter of a row. The rows of one attribute have one setter between them. */
static void exchange_watch(PyGetSetDef *row, setter ours, setter *original)
{
    if (row == NULL || row->set == NULL || row->set == ours || (*original != NULL && row->set != *original) ||
        !is_writable(&row->set))
        return;
    *original = row->set;
    row->set = ours;
}

/* CPython has two rows for `__dict__`: of classes that are weakly referable too, and of those that are not. */
static int exchange_start(void)
{
    exchange_watch(own_getset(&PyBaseObject_Type, "__class__"), exchange_class, &class_setter);
    PyObject *both = PyObject_CallFunction((PyObject *)&PyType_Type, "s(){}", "Both");
    PyObject *slim = PyObject_CallFunction((PyObject *)&PyType_Type, "s(){s(s)}", "Slim", "__slots__", "__dict__");
    if (both != NULL && slim != NULL) {
        exchange_watch(own_getset((PyTypeObject *)both, "__dict__"), exchange_dict, &dict_setter);
        exchange_watch(own_getset((PyTypeObject *)slim, "__dict__"), exchange_dict, &dict_setter);
    }
    int failed = both == NULL || slim == NULL;
    Py_XDECREF(both);
    Py_XDECREF(slim);
    return failed ? -1 : 0;
}

static bool class_exchange_is_seen(void)
{
    return class_setter != NULL;
}

/* Whether instances get another dict only with a new epoch: the class that brought the dict is of Python's making. */
static bool dict_exchange_is_seen(PyTypeObject *type)
{
    while (type->tp_base != NULL && type->tp_base->tp_dictoffset != 0)
        type = type->tp_base;
    const PyGetSetDef *row = class_setter == NULL ? NULL : own_getset(type, "__dict__");
    return row != NULL && row->set == exchange_dict;
}

#endif
