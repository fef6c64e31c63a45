/* fskv._native: moves chunks and looks at files outside the interpreter. fskv/data_path/runner.py says how it is used, and
 * fskv/index/presence.py how its look at files is.
 */
#include "types.h"

#include <string.h>

#include "xxh3.h"

static PyObject *row_digests(PyObject *module, PyObject *object)
{
    Py_buffer view;
    if (PyObject_GetBuffer(object, &view, PyBUF_SIMPLE) != 0)
        return NULL;
    PyObject *digests = NULL;
    size_t nbytes = (size_t)view.len, tail = nbytes % ROW;
    if (nbytes == 0 || (tail != 0 && tail < XXH3_MIN_NBYTES))
        PyErr_Format(PyExc_ValueError, "row_digests: %zd bytes; rows must not be shorter than %d",
                     view.len, XXH3_MIN_NBYTES);
    else
        digests = PyBytes_FromStringAndSize(NULL, 8 * (Py_ssize_t)num_rows(nbytes));
    if (digests != NULL) {
        Py_BEGIN_ALLOW_THREADS
        digest_rows(view.buf, nbytes, (uint8_t *)PyBytes_AS_STRING(digests));
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&view);
    return digests;
}

static PyObject *load_crypto(PyObject *module, PyObject *library)
{
    const char *name = PyUnicode_AsUTF8(library);
    return name == NULL ? NULL : PyBool_FromLong(crypto_load(name));
}

/* For the chunks that fskv/data_path/store.py does itself. */
static PyObject *crypt_some(PyObject *module, PyObject *args)
{
    Py_buffer rows, seal;
    RowsOf of;
    Py_ssize_t first_row;
    int encrypt;
    ssize_t done = 0;
    if (!PyArg_ParseTuple(args, "y#y#y#Iw*nw*p:crypt_rows", &of.keys, &of.keys_nbytes, &of.context, &of.context_nbytes,
                          &of.key, &of.key_nbytes, &of.first_block, &rows, &first_row, &seal, &encrypt))
        return NULL;
    bool fit = of.keys_nbytes > 0 && of.keys_nbytes % (KEY_ID + KEY) == 0 && of.context_nbytes <= MAX_CONTEXT &&
               of.key_nbytes <= 255 && first_row >= 0 && seal.len >= SEAL &&
               (size_t)first_row + num_rows((size_t)rows.len) <= (size_t)(seal.len - SEAL) / TAG;
    if (fit) {
        Py_BEGIN_ALLOW_THREADS
        done = crypt_rows(&of, rows.buf, (size_t)rows.len, (size_t)first_row, seal.buf, encrypt);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&rows);
    PyBuffer_Release(&seal);
    if (!fit)
        return PyErr_Format(PyExc_ValueError, "crypt_rows: no keys, a context or key too long, or no place for tags");
    return PyLong_FromSsize_t(done);
}

/* A slot is a buffer of the host, or (address, bytes) where the pages are on a device too. */
static bool take_slot(PyObject *object, bool on_device, Py_buffer *view, Slot *slot)
{
    unsigned long long address;
    if (!PyTuple_Check(object)) {
        if (PyObject_GetBuffer(object, view, PyBUF_WRITABLE) != 0)
            return false;
        slot->memory = view->buf;
        return true;
    }
    if (!PyArg_ParseTuple(object, "Kn:copy_spans", &address, &view->len))
        return false;
    slot->address = address;
    if (!on_device || address == 0 || view->len < 0) {
        PyErr_SetString(PyExc_ValueError, "copy_spans: a slot on a device, for pages that are not");
        return false;
    }
    return true;
}

static PyObject *copy(PyObject *module, PyObject *args)
{
    PyObject *pages, *table, *object;
    Py_buffer view = {0}, memory = {0};
    Slot slot = {0};
    Py_ssize_t base;
    int to_slot;
    if (!PyArg_ParseTuple(args, "O!OOnp:copy_spans", &PagesType, &pages, &table, &object, &base, &to_slot) ||
        !take_slot(object, ((Pages *)pages)->device != NULL, &memory, &slot))
        return NULL;
    if (PyObject_GetBuffer(table, &view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) {
        PyBuffer_Release(&memory);
        return NULL;
    }
    bool fit = false, good = true;
    CudaError error;
    const char *format = view.format ? view.format : "";
    Spans spans = {view.buf, (size_t)view.len / sizeof(Span)};
    if (base < 0 || base > memory.len)
        PyErr_SetString(PyExc_ValueError, "copy_spans: base is outside the slot");
    else if (view.itemsize != 8 || view.len % (Py_ssize_t)sizeof(Span) || (strcmp(format, "l") && strcmp(format, "q")))
        PyErr_SetString(PyExc_ValueError, "spans: expected int64 of shape (n, 4)");
    else
        fit = spans_fit((Pages *)pages, &spans, (size_t)base, (size_t)memory.len);
    if (fit) {
        slot.memory = slot.address == 0 ? slot.memory + base : NULL;
        slot.address += slot.address == 0 ? 0 : (uint64_t)base;
        Py_BEGIN_ALLOW_THREADS
        good = copy_spans((Pages *)pages, &spans, &slot, to_slot, &error);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&view);
    PyBuffer_Release(&memory);
    if (!fit || !good)
        return fit ? set_cuda_error(&error) : NULL;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"row_digests", row_digests, METH_O, "row_digests(payload): see fskv.format.integrity."},
    {"copy_spans", copy, METH_VARARGS,
     "copy_spans(pages, spans, slot, base, to_slot): copy every span; a slot may be (address, bytes) on the device. ValueError when one is outside, "
     "RuntimeError when the device's driver says no."},
    {"load_crypto", load_crypto, METH_O, "load_crypto(library): open libcrypto by that name; whether it can be used."},
    {"crypt_rows", crypt_some, METH_VARARGS,
     "crypt_rows(keys, context, key, first_block, rows, first_row, seal, encrypt): see csrc/crypto.h; `seal` has room "
     "for all tags."},
    {"probe_chunks", probe_chunks, METH_VARARGS,
     "probe_chunks(directory, names, groups, missed_before, files, num_ranks): see fskv.index.presence.probe_chunks; "
     "returns a byte for each chunk, how many could not be looked at, the first errno, and the seconds it took."},
    {"stamp_use", stamp_file, METH_VARARGS,
     "stamp_use(directory_fd, name, use, depth, fresh): see csrc/chunk_io.h; `use` is a bytearray of 8."},
    {NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "fskv._native",
    .m_doc = "Moves chunks and looks at files outside the interpreter.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__native(void)
{
    static PyTypeObject *types[] = {&DeviceType, &PagesType,    &PlacementType, &GuardType,
                                    &LayoutType, &TransferType, &QueueType};
    xxh3_init();
    copy_init();
    PyObject *module = PyModule_Create(&definition);
    for (size_t i = 0; module != NULL && i < sizeof types / sizeof *types; i++)
        if (PyModule_AddType(module, types[i]) != 0)
            Py_CLEAR(module);
    return module;
}
