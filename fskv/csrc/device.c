/* fskv._native.Device: a CUDA device as Python sees it. */
#include "types.h"

PyObject *set_cuda_error(const CudaError *error)
{
    if (error->code == 0)
        return PyErr_Format(PyExc_RuntimeError, "%s", error->call);
    return PyErr_Format(PyExc_RuntimeError, "%s answers CUDA error %d", error->call, error->code);
}

static PyObject *Device_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    CudaOptions options = {0};
    Py_ssize_t bounce_nbytes;
    if (!PyArg_ParseTuple(args, "sini:Device", &options.library, &options.device_idx, &bounce_nbytes,
                          &options.num_lanes))
        return NULL;
    if (bounce_nbytes < 0)
        return PyErr_Format(PyExc_ValueError, "Device: %zd bytes", bounce_nbytes);
    options.bounce_nbytes = (size_t)bounce_nbytes;
    Device *self = (Device *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    CudaError error;
    Py_BEGIN_ALLOW_THREADS
    self->cuda = cuda_open(&options, &error);
    Py_END_ALLOW_THREADS
    if (self->cuda == NULL) {
        Py_DECREF(self);
        return set_cuda_error(&error);
    }
    return (PyObject *)self;
}

static PyObject *Device_register(Device *self, PyObject *object)
{
    Py_buffer view;
    if (PyObject_GetBuffer(object, &view, PyBUF_WRITABLE) != 0)
        return NULL;
    CudaError error;
    bool good;
    Py_BEGIN_ALLOW_THREADS
    good = cuda_register(self->cuda, view.buf, (size_t)view.len, &error);
    Py_END_ALLOW_THREADS
    if (!good) {
        PyBuffer_Release(&view);
        return set_cuda_error(&error);
    }
    /* Only now, with the interpreter: other threads may have registered something meanwhile, or closed. */
    Py_buffer *grown = NULL;
    if (!self->closed)
        grown = PyMem_Realloc(self->registered, (size_t)(self->num_registered + 1) * sizeof *grown);
    if (grown == NULL) {
        Py_BEGIN_ALLOW_THREADS
        cuda_unregister(self->cuda, view.buf);
        Py_END_ALLOW_THREADS
        PyBuffer_Release(&view);
        if (!self->closed)
            return PyErr_NoMemory();
        PyErr_SetString(PyExc_RuntimeError, "the device was given up");
        return NULL;
    }
    self->registered = grown;
    self->registered[self->num_registered++] = view;
    Py_RETURN_NONE;
}

static PyObject *Device_close(Device *self, PyObject *unused)
{
    Py_ssize_t n = self->num_registered;
    Py_buffer *registered = self->registered;
    self->closed = true;
    self->num_registered = 0;
    self->registered = NULL;
    Py_BEGIN_ALLOW_THREADS
    cuda_close(self->cuda);
    for (Py_ssize_t i = 0; i < n; i++)
        cuda_unregister(self->cuda, registered[i].buf);
    Py_END_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < n; i++)
        PyBuffer_Release(&registered[i]);
    PyMem_Free(registered);
    Py_RETURN_NONE;
}

static PyObject *Device_allocate(Device *self, PyObject *args)
{
    Py_ssize_t nbytes;
    uint64_t address;
    CudaError error;
    if (!PyArg_ParseTuple(args, "n:allocate", &nbytes))
        return NULL;
    if (nbytes <= 0)
        return PyErr_Format(PyExc_ValueError, "allocate: %zd bytes", nbytes);
    bool good;
    Py_BEGIN_ALLOW_THREADS
    good = cuda_allocate(self->cuda, (size_t)nbytes, &address, &error);
    Py_END_ALLOW_THREADS
    if (!good)
        return set_cuda_error(&error);
    return PyLong_FromUnsignedLongLong(address);
}

static PyObject *Device_release(Device *self, PyObject *args)
{
    unsigned long long address;
    if (!PyArg_ParseTuple(args, "K:release", &address))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    cuda_release(self->cuda, address);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static void Device_dealloc(Device *self)
{
    if (self->cuda != NULL) {
        Py_XDECREF(Device_close(self, NULL));
        cuda_free(self->cuda);
    }
    Py_TYPE(self)->tp_free(self);
}

static PyMethodDef Device_methods[] = {
    {"register", (PyCFunction)Device_register, METH_O,
     "register(memory): let copies use a buffer of the host, which is kept until close()."},
    {"allocate", (PyCFunction)Device_allocate, METH_VARARGS, "allocate(nbytes): the address of memory on it."},
    {"release", (PyCFunction)Device_release, METH_VARARGS, "release(address): give it back."},
    {"close", (PyCFunction)Device_close, METH_NOARGS,
     "close(): wait for copies, refuse others, give back all memory and what was registered."},
    {NULL},
};

static PyObject *Device_uses_kernel(Device *self, void *unused)
{
    return PyBool_FromLong(cuda_uses_kernel(self->cuda));
}

static PyObject *Device_num_lanes(Device *self, void *unused)
{
    return PyLong_FromLong(cuda_num_lanes(self->cuda));
}

static PyGetSetDef Device_getset[] = {
    {"uses_kernel", (getter)Device_uses_kernel, NULL, "Whether a chunk crosses the bus in one copy.", NULL},
    {"num_lanes", (getter)Device_num_lanes, NULL, "Copies at once, at most.", NULL},
    {NULL},
};

PyTypeObject DeviceType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "fskv._native.Device",
    .tp_doc = "Device(library, device_idx, bounce_nbytes, num_lanes): a CUDA device, through its driver.",
    .tp_basicsize = sizeof(Device),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = Device_new,
    .tp_dealloc = (destructor)Device_dealloc,
    .tp_methods = Device_methods,
    .tp_getset = Device_getset,
};
