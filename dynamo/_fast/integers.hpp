// Python integers to machine words without a call per integer.
#pragma once

#include <Python.h>

#include <cstdint>

namespace dynamo {

// True and `*out` set if `object` is an int of one CPython digit (0 .. 2^30 - 1): every token id.
inline bool small_u32(PyObject *object, uint32_t *out) {
    if (!PyLong_Check(object)) return false;
    PyLongObject *integer = reinterpret_cast<PyLongObject *>(object);
#if PY_VERSION_HEX >= 0x030C0000
    if (!PyUnstable_Long_IsCompact(integer)) return false;
    Py_ssize_t value = PyUnstable_Long_CompactValue(integer);
    if (value < 0) return false;
    *out = static_cast<uint32_t>(value);
    return true;
#else
    Py_ssize_t digits = Py_SIZE(integer);
    if (digits != 1 && digits != 0) return false;
    *out = digits ? static_cast<uint32_t>(integer->ob_digit[0]) : 0;
    return true;
#endif
}

// Converts the leading run of small integers; returns how many, so that the caller can take the
// rare rest (large, negative or not an int) the careful way. Runs no Python code.
inline Py_ssize_t small_u32_run(PyObject *const *items, Py_ssize_t count, uint32_t *out) {
    Py_ssize_t done = 0;
    while (done < count && small_u32(items[done], out + done)) done++;
    return done;
}

}  // namespace dynamo
