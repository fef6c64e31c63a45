/* An engine's keys as a Python type: fskv/data_path/store.py encrypts with it the chunks that it does itself. */
#include "types.h"

#include <string.h>

static PyObject *Keys_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    const char *library;
    if (!PyArg_ParseTuple(args, "s:Keys", &library))
        return NULL;
    if (!crypto_load(library))
        return PyErr_Format(PyExc_OSError, "no libcrypto that can be used: %s", library);
    Keys *self = (Keys *)type->tp_alloc(type, 0);
    if (self != NULL)
        pthread_mutex_init(&self->ring.mutex, NULL);
    return (PyObject *)self;
}

static void wipe(NamedKey *keys, size_t num)
{
    if (keys != NULL)
        explicit_bzero(keys, num * sizeof *keys);
    PyMem_RawFree(keys);
}

static void Keys_dealloc(Keys *self)
{
    wipe(self->ring.keys, self->ring.num);
    pthread_mutex_destroy(&self->ring.mutex);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *Keys_replace(Keys *self, PyObject *list)
{
    Py_ssize_t n = PyList_Check(list) ? PyList_GET_SIZE(list) : 0;
    NamedKey *keys = PyMem_RawCalloc((size_t)n + 1, sizeof *keys);
    if (keys == NULL)
        return PyErr_NoMemory();
    bool good = n > 0;
    for (Py_ssize_t i = 0; good && i < n; i++) {
        const char *id, *key;
        Py_ssize_t id_nbytes, key_nbytes;
        PyObject *item = PyList_GET_ITEM(list, i);
        good = PyTuple_Check(item) && PyArg_ParseTuple(item, "y#y#", &id, &id_nbytes, &key, &key_nbytes) &&
               id_nbytes > 0 && id_nbytes <= KEY_ID && key_nbytes == KEY;
        if (good) {
            memcpy(keys[i].id, id, (size_t)id_nbytes);
            memcpy(keys[i].key, key, KEY);
        }
    }
    if (!good) {
        wipe(keys, (size_t)n);
        PyErr_Clear();
        return PyErr_Format(PyExc_ValueError, "keys: expected (id of 1 to %d bytes, key of %d), one at least", KEY_ID,
                            KEY);
    }
    pthread_mutex_lock(&self->ring.mutex);
    NamedKey *old = self->ring.keys;
    size_t num_old = self->ring.num;
    self->ring.keys = keys;
    self->ring.num = (size_t)n;
    pthread_mutex_unlock(&self->ring.mutex);
    wipe(old, num_old);
    Py_RETURN_NONE;
}

static bool is_bound(const Keys *self, const RowsOf *of)
{
    if (self->ring.num > 0 && of->context_nbytes <= MAX_CONTEXT && of->key_nbytes > 0 && of->key_nbytes <= 255)
        return true;
    PyErr_SetString(PyExc_ValueError, "rows: no keys yet, or a context or a key that is too long");
    return false;
}

static PyObject *Keys_encrypt(Keys *self, PyObject *args)
{
    Py_buffer rows;
    RowsOf of;
    FileKey file_key;
    if (!PyArg_ParseTuple(args, "w*y#y#I:encrypt", &rows, &of.context, &of.context_nbytes, &of.key, &of.key_nbytes,
                          &of.first_block))
        return NULL;
    size_t num = num_rows((size_t)rows.len), done = 0;
    PyObject *seal = NULL;
    if (is_bound(self, &of))
        seal = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(SEAL + TAG * num));
    if (seal != NULL) {
        uint8_t *bytes = (uint8_t *)PyBytes_AS_STRING(seal);
        Py_BEGIN_ALLOW_THREADS
        if (new_file_key(&self->ring, bytes, &file_key))
            done = crypt_rows(&file_key, &of, rows.buf, (size_t)rows.len, 0, bytes + SEAL, true);
        explicit_bzero(&file_key, sizeof file_key);
        Py_END_ALLOW_THREADS
        if (done != num) {
            Py_CLEAR(seal);
            PyErr_SetString(PyExc_RuntimeError, "libcrypto could not encrypt");
        }
    }
    PyBuffer_Release(&rows);
    return seal;
}

static PyObject *Keys_decrypt(Keys *self, PyObject *args)
{
    Py_buffer rows;
    RowsOf of;
    FileKey file_key;
    const char *seal;
    Py_ssize_t seal_nbytes, first_row, sound = -1;
    if (!PyArg_ParseTuple(args, "w*y#y#Iny#:decrypt", &rows, &of.context, &of.context_nbytes, &of.key, &of.key_nbytes,
                          &of.first_block, &first_row, &seal, &seal_nbytes))
        return NULL;
    size_t num = num_rows((size_t)rows.len);
    bool fit = is_bound(self, &of);
    if (fit && (first_row < 0 || seal_nbytes < SEAL ||
                (size_t)first_row + num > (size_t)(seal_nbytes - SEAL) / TAG)) {
        PyErr_SetString(PyExc_ValueError, "decrypt: rows without a tag");
        fit = false;
    }
    if (fit) {
        uint8_t *bytes = (uint8_t *)seal; /* read alone */
        Py_BEGIN_ALLOW_THREADS
        if (find_file_key(&self->ring, bytes, &file_key))
            sound = (Py_ssize_t)crypt_rows(&file_key, &of, rows.buf, (size_t)rows.len, (size_t)first_row,
                                           bytes + SEAL + TAG * first_row, false);
        explicit_bzero(&file_key, sizeof file_key);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&rows);
    return fit ? PyLong_FromSsize_t(sound) : NULL;
}

static PyMethodDef Keys_methods[] = {
    {"replace", (PyCFunction)Keys_replace, METH_O, "replace([(id, key)]): the keys from now on; the first writes."},
    {"encrypt", (PyCFunction)Keys_encrypt, METH_VARARGS,
     "encrypt(payload, context, key, first_block): encrypt a file's rows in place; returns seal and tags."},
    {"decrypt", (PyCFunction)Keys_decrypt, METH_VARARGS,
     "decrypt(rows, context, key, first_block, first_row, seal): decrypt rows in place; returns how many were sound "
     "before another one, or -1 without the key."},
    {NULL},
};

PyTypeObject KeysType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "fskv._native.Keys",
    .tp_doc = "Keys(library): the keys of an engine, and libcrypto, which is opened by that name. Raises OSError.",
    .tp_basicsize = sizeof(Keys),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = Keys_new,
    .tp_dealloc = (destructor)Keys_dealloc,
    .tp_methods = Keys_methods,
};
