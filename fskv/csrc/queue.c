/* The queue of a worker's transfers. Threads that `take` from it stay here as long as all goes well: they run
 * one transfer after the other and need the interpreter for none of them. What becomes of each is an event,
 * which the engine's thread collects.
 */
#include "types.h"

#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct {
    Transfer *first, *last;
    int length;
} List;

typedef enum { GATHERED, STORED, EXISTS, LOADED, ABANDONED, READ, ENDED } Kind;

/* Of a transfer after a thread's turn: Python goes on; it has ended; it waits for its pages. */
typedef enum { OTHERWISE, OVER, AWAY } Turn;

typedef struct {
    Transfer *transfer; /* one reference */
    Kind kind;
    bool last; /* the transfer has ended */
    double seconds;
} Event;

typedef struct {
    PyObject_HEAD
    pthread_mutex_t mutex; /* guards all below, and what types.h says of a Transfer */
    pthread_cond_t changed;
    List loads, stores, running, parked;
    int num_loads_running, num_stores_running;
    int max_stores_beside_loads;
    int num_idle, num_hung;
    bool closed;
    Event *events;
    size_t num_events, max_events;
} Queue;

static void append(List *list, Transfer *transfer)
{
    transfer->previous = list->last;
    transfer->next = NULL;
    *(list->last ? &list->last->next : &list->first) = transfer;
    list->last = transfer;
    list->length++;
}

static void detach(List *list, Transfer *transfer)
{
    *(transfer->previous ? &transfer->previous->next : &list->first) = transfer->next;
    *(transfer->next ? &transfer->next->previous : &list->last) = transfer->previous;
    transfer->previous = transfer->next = NULL;
    list->length--;
}

static List *queued_in(Queue *queue, Transfer *transfer)
{
    if (transfer->state == PARKED)
        return &queue->parked;
    return transfer->is_load ? &queue->loads : &queue->stores;
}

/* Under the mutex. An event that finds no memory is kept back: the transfer then ends at its deadline. */
static void add_event(Queue *queue, Transfer *transfer, Kind kind, bool last)
{
    if (queue->num_events == queue->max_events) {
        size_t wanted = queue->max_events ? 2 * queue->max_events : 256;
        Event *grown = realloc(queue->events, wanted * sizeof *grown);
        if (grown == NULL)
            return;
        queue->events = grown;
        queue->max_events = wanted;
    }
    transfer->spare_refs--;
    queue->events[queue->num_events++] =
        (Event){transfer, kind, last, monotonic_s() - transfer->started_at};
}

/* Under the mutex: the next transfer that may start, or NULL. Loads first; beside them only a few stores. */
static Transfer *pop(Queue *queue)
{
    Transfer *transfer = queue->loads.first;
    if (transfer == NULL && (queue->num_loads_running == 0 ||
                             queue->num_stores_running < queue->max_stores_beside_loads))
        transfer = queue->stores.first;
    if (transfer == NULL)
        return NULL;
    detach(queued_in(queue, transfer), transfer);
    append(&queue->running, transfer);
    transfer->state = RUNNING;
    transfer->started_at = monotonic_s();
    *(transfer->is_load ? &queue->num_loads_running : &queue->num_stores_running) += 1;
    if (queue->num_idle > 0 && queue->loads.length + queue->stores.length > 0)
        pthread_cond_signal(&queue->changed);
    return transfer;
}

/* Under the mutex: stores that gave way may now start. */
static void stop_counting(Queue *queue, Transfer *transfer)
{
    *(transfer->is_load ? &queue->num_loads_running : &queue->num_stores_running) -= 1;
    if (queue->num_idle > 0 && queue->stores.length > 0)
        pthread_cond_broadcast(&queue->changed);
}

/* Under the mutex: the transfer's thread is free again. Returns whether it had been written off. */
static bool end(Queue *queue, Transfer *transfer, State state)
{
    detach(&queue->running, transfer);
    transfer->state = state;
    if (transfer->written_off)
        queue->num_hung--;
    else
        stop_counting(queue, transfer);
    return transfer->written_off;
}

/* --- without the interpreter --------------------------------------------------------------- */

static Turn run_store(Queue *queue, Transfer *transfer, uint8_t *slot, Kind *kind)
{
    if (!transfer->gathered) {
        if (transfer->placement == NULL)
            return OTHERWISE;
        if (!guard_enter(transfer->guard)) {
            *kind = ABANDONED;
            return OVER;
        }
        bool gathered = gather(transfer, slot);
        guard_leave(transfer->guard);
        if (!gathered)
            return OTHERWISE;
        pthread_mutex_lock(&queue->mutex);
        add_event(queue, transfer, GATHERED, false);
        pthread_mutex_unlock(&queue->mutex);
    }
    transfer->tried = true;
    ChunkResult result = chunk_write(&transfer->layout->file, &transfer->file, slot, transfer->digested);
    *kind = result == CHUNK_OK ? STORED : EXISTS;
    return result == CHUNK_OTHERWISE ? OTHERWISE : OVER;
}

/* Let a load that was read wait for its pages, without the thread; false: they are free, or it was given up. Under the
 * mutex: who gives it up closes the guard, and then takes it back if it finds it parked. */
static bool park(Queue *queue, Transfer *transfer, bool *written_off)
{
    pthread_mutex_lock(&queue->mutex);
    bool parked = transfer->held && !guard_abandoned(transfer->guard);
    if (parked) {
        transfer->read = true;
        transfer->began_at = transfer->started_at;
        add_event(queue, transfer, READ, false);
        *written_off = end(queue, transfer, PARKED);
        transfer->written_off = false;
        append(&queue->parked, transfer);
    }
    pthread_mutex_unlock(&queue->mutex);
    return parked;
}

static Turn run_load(Queue *queue, Transfer *transfer, uint8_t *slot, Kind *kind, bool *written_off)
{
    const FileLayout *file = &transfer->layout->file;
    int fd = -1, old_mtime;
    if (!transfer->read) {
        if (chunk_read(file, &transfer->file, slot, &fd, &old_mtime) != CHUNK_OK)
            return OTHERWISE;
        transfer->old_mtime = old_mtime;
        if (transfer->placement != NULL && transfer->slot.buf != NULL && park(queue, transfer, written_off)) {
            close(fd); /* the transfer is somebody else's already */
            return AWAY;
        }
    }
    bool scattered = transfer->placement != NULL && !transfer->lost;
    if (scattered && guard_enter(transfer->guard)) {
        scattered = scatter(transfer, slot);
        guard_leave(transfer->guard);
        *kind = LOADED;
    }
    if (!scattered) {
        transfer->checked = true; /* Python scatters, and touches the file afterwards */
        if (fd >= 0)
            close(fd);
        return OTHERWISE;
    }
    if (*kind == LOADED) {
        /* Told before the disk is touched again: what can go wrong there must not spoil a load. */
        pthread_mutex_lock(&queue->mutex);
        add_event(queue, transfer, LOADED, false);
        pthread_mutex_unlock(&queue->mutex);
        *kind = ENDED;
    }
    if (transfer->old_mtime && fd >= 0)
        (void)futimens(fd, NULL);
    else if (transfer->old_mtime)
        chunk_touch(file, &transfer->file);
    if (fd >= 0)
        close(fd);
    return OVER;
}

/* Run transfers until one needs Python (returned), the queue is closed, or this thread was written off (NULL). */
static Transfer *run_until_otherwise(Queue *queue, uint8_t *slot, size_t slot_nbytes)
{
    for (;;) {
        pthread_mutex_lock(&queue->mutex);
        Transfer *transfer;
        while ((transfer = pop(queue)) == NULL && !queue->closed) {
            queue->num_idle++;
            pthread_cond_wait(&queue->changed, &queue->mutex);
            queue->num_idle--;
        }
        pthread_mutex_unlock(&queue->mutex);
        if (transfer == NULL)
            return NULL;
        if (slot == NULL || transfer->layout == NULL)
            return transfer;
        const FileLayout *file = &transfer->layout->file;
        uint8_t *buffer = transfer->slot.buf ? transfer->slot.buf : slot;
        if (buffer == slot && file->header_nbytes + file->payload_nbytes > slot_nbytes)
            return transfer;

        Kind kind = ABANDONED;
        bool written_off = false;
        Turn turn = transfer->is_load ? run_load(queue, transfer, buffer, &kind, &written_off)
                                      : run_store(queue, transfer, buffer, &kind);
        if (turn == OTHERWISE)
            return transfer;
        if (turn == OVER) {
            pthread_mutex_lock(&queue->mutex);
            written_off = end(queue, transfer, DONE);
            add_event(queue, transfer, kind, true);
            /* From here on the transfer belongs to whoever collects its event. */
            pthread_mutex_unlock(&queue->mutex);
        }
        if (written_off)
            return NULL;
    }
}

/* --- with it --------------------------------------------------------------------------------- */

static void drop_spare_refs(Transfer *transfer)
{
    for (int n = transfer->spare_refs; n > 0; n--) {
        transfer->spare_refs = n - 1;
        Py_DECREF(transfer);
    }
}

/* It has ended. Its owner refers to it, and that circle would wait for the collector. */
static void let_go(Transfer *transfer)
{
    Py_INCREF(transfer);
    drop_spare_refs(transfer);
    Py_CLEAR(transfer->owner);
    Py_DECREF(transfer);
}

static PyObject *Queue_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    int max_stores_beside_loads;
    if (!PyArg_ParseTuple(args, "i:Queue", &max_stores_beside_loads))
        return NULL;
    Queue *self = (Queue *)type->tp_alloc(type, 0);
    if (self != NULL) {
        pthread_mutex_init(&self->mutex, NULL);
        pthread_cond_init(&self->changed, NULL);
        self->max_stores_beside_loads = max_stores_beside_loads;
    }
    return (PyObject *)self;
}

static bool is_transfer(PyObject *object)
{
    if (PyObject_TypeCheck(object, &TransferType))
        return true;
    PyErr_SetString(PyExc_TypeError, "expected a Transfer");
    return false;
}

static PyObject *Queue_push(Queue *self, PyObject *tasks)
{
    if (!PyList_Check(tasks))
        return PyErr_Format(PyExc_TypeError, "push: expected a list of Transfers");
    Py_ssize_t n = PyList_GET_SIZE(tasks);
    for (Py_ssize_t i = 0; i < n; i++) {
        if (!is_transfer(PyList_GET_ITEM(tasks, i)))
            return NULL;
        Transfer *transfer = (Transfer *)PyList_GET_ITEM(tasks, i);
        if (transfer->state != NEW || transfer->spare_refs != 0) {
            for (Py_ssize_t k = 0; k < i; k++)
                drop_spare_refs((Transfer *)PyList_GET_ITEM(tasks, k));
            return PyErr_Format(PyExc_ValueError, "push: this transfer was queued before");
        }
        /* One reference for each event to come; there are at most so many. */
        for (transfer->spare_refs = 0; transfer->spare_refs < 2 + transfer->held; transfer->spare_refs++)
            Py_INCREF(transfer);
    }
    /* One lock and one wake-up for all: the caller holds the interpreter, and each may cost it its CPU. The thread
     * that is woken wakes the next. */
    pthread_mutex_lock(&self->mutex);
    bool closed = self->closed;
    for (Py_ssize_t i = 0; i < n && !closed; i++) {
        Transfer *transfer = (Transfer *)PyList_GET_ITEM(tasks, i);
        List *list = queued_in(self, transfer);
        transfer->state = QUEUED;
        transfer->queue = self;
        append(list, transfer);
    }
    if (n > 0 && !closed && self->num_idle > 0)
        pthread_cond_signal(&self->changed);
    bool wanted = !closed && self->loads.length + self->stores.length > self->num_idle;
    pthread_mutex_unlock(&self->mutex);
    for (Py_ssize_t i = 0; i < n && closed; i++)
        drop_spare_refs((Transfer *)PyList_GET_ITEM(tasks, i));
    return PyBool_FromLong(wanted);
}

static PyObject *Queue_cancel(Queue *self, PyObject *object)
{
    if (!is_transfer(object))
        return NULL;
    Transfer *transfer = (Transfer *)object;
    pthread_mutex_lock(&self->mutex);
    bool queued = (transfer->state == QUEUED || transfer->state == PARKED) && transfer->queue == self;
    if (queued) {
        detach(queued_in(self, transfer), transfer);
        transfer->state = DONE;
    }
    pthread_mutex_unlock(&self->mutex);
    if (queued)
        let_go(transfer);
    return PyBool_FromLong(queued);
}

static PyObject *Queue_hasten(Queue *self, PyObject *object)
{
    if (!is_transfer(object))
        return NULL;
    Transfer *transfer = (Transfer *)object;
    pthread_mutex_lock(&self->mutex);
    if (transfer->state == QUEUED && transfer->queue == self) {
        List *list = queued_in(self, transfer);
        detach(list, transfer);
        transfer->next = list->first;
        *(list->first ? &list->first->previous : &list->last) = transfer;
        list->first = transfer;
        list->length++;
    }
    pthread_mutex_unlock(&self->mutex);
    Py_RETURN_NONE;
}

static PyObject *Queue_release(Queue *self, PyObject *args)
{
    PyObject *tasks;
    int fired;
    if (!PyArg_ParseTuple(args, "O!p:release", &PyList_Type, &tasks, &fired))
        return NULL;
    Py_ssize_t n = PyList_GET_SIZE(tasks);
    for (Py_ssize_t i = 0; i < n; i++)
        if (!is_transfer(PyList_GET_ITEM(tasks, i)))
            return NULL;
    pthread_mutex_lock(&self->mutex);
    for (Py_ssize_t i = 0; i < n; i++) {
        Transfer *transfer = (Transfer *)PyList_GET_ITEM(tasks, i);
        transfer->held = false;
        transfer->lost |= !fired;
        if (transfer->state != PARKED || transfer->queue != self)
            continue;
        detach(&self->parked, transfer);
        transfer->state = QUEUED;
        append(&self->loads, transfer);
    }
    if (n > 0 && self->num_idle > 0)
        pthread_cond_signal(&self->changed);
    bool wanted = !self->closed && self->loads.length + self->stores.length > self->num_idle;
    pthread_mutex_unlock(&self->mutex);
    return PyBool_FromLong(wanted);
}

static PyObject *Queue_write_off(Queue *self, PyObject *object)
{
    if (!is_transfer(object))
        return NULL;
    Transfer *transfer = (Transfer *)object;
    pthread_mutex_lock(&self->mutex);
    bool now = transfer->state == RUNNING && transfer->queue == self && !transfer->written_off;
    if (now) {
        transfer->written_off = true;
        self->num_hung++;
        stop_counting(self, transfer); /* a call that hangs holds nobody back */
    }
    pthread_mutex_unlock(&self->mutex);
    return PyBool_FromLong(now);
}

static PyObject *Queue_finish(Queue *self, PyObject *object)
{
    if (!is_transfer(object))
        return NULL;
    Transfer *transfer = (Transfer *)object;
    pthread_mutex_lock(&self->mutex);
    bool running = transfer->state == RUNNING && transfer->queue == self;
    bool written_off = running && end(self, transfer, DONE);
    pthread_mutex_unlock(&self->mutex);
    if (running)
        let_go(transfer);
    return PyBool_FromLong(written_off);
}

static PyObject *Queue_take(Queue *self, PyObject *own)
{
    Py_buffer view = {0};
    PyObject *array = own == Py_None ? Py_NewRef(own) : PyObject_GetAttrString(own, "array");
    int failed = array == NULL ||
                 (array != Py_None && PyObject_GetBuffer(array, &view, PyBUF_WRITABLE) != 0);
    Py_XDECREF(array);
    if (failed)
        return NULL;
    Transfer *transfer;
    Py_BEGIN_ALLOW_THREADS
    transfer = run_until_otherwise(self, view.buf, (size_t)view.len);
    Py_END_ALLOW_THREADS
    if (view.obj != NULL)
        PyBuffer_Release(&view);
    /* The queue's own references keep it until `finish`. */
    return Py_NewRef(transfer ? (PyObject *)transfer : Py_None);
}

static PyObject *Queue_take_events(Queue *self, PyObject *unused)
{
    pthread_mutex_lock(&self->mutex);
    Event *events = self->events;
    size_t num_events = self->num_events;
    self->events = NULL;
    self->num_events = self->max_events = 0;
    pthread_mutex_unlock(&self->mutex);

    PyObject *list = PyList_New(0);
    for (size_t i = 0; i < num_events; i++) {
        Transfer *transfer = events[i].transfer;
        /* Without an owner, Python has done the rest itself and knows. */
        if (list != NULL && events[i].kind != ENDED && transfer->owner != NULL) {
            PyObject *event =
                Py_BuildValue("(Oid)", transfer->owner, events[i].kind, events[i].seconds);
            if (event == NULL || PyList_Append(list, event) != 0)
                Py_CLEAR(list);
            Py_XDECREF(event);
        }
        if (events[i].last)
            let_go(transfer);
        Py_DECREF(transfer);
    }
    free(events);
    return list;
}

static PyObject *Queue_running(Queue *self, PyObject *unused)
{
    PyObject *list = PyList_New(0);
    /* References are taken under the mutex; nothing that allocates may call back into us. */
    pthread_mutex_lock(&self->mutex);
    int length = self->running.length, n = 0;
    Transfer **found = malloc(sizeof *found * (size_t)(length + 1));
    for (Transfer *t = self->running.first; t != NULL && found != NULL; t = t->next) {
        Py_INCREF(t);
        found[n++] = t;
    }
    pthread_mutex_unlock(&self->mutex);
    for (int i = 0; i < n; i++) {
        if (list != NULL && PyList_Append(list, (PyObject *)found[i]) != 0)
            Py_CLEAR(list);
        Py_DECREF(found[i]);
    }
    free(found);
    return list;
}

static void drop_queued(Queue *self)
{
    pthread_mutex_lock(&self->mutex);
    List dropped[3] = {self->loads, self->stores, self->parked};
    memset(&self->loads, 0, sizeof self->loads);
    memset(&self->stores, 0, sizeof self->stores);
    memset(&self->parked, 0, sizeof self->parked);
    for (int i = 0; i < 3; i++)
        for (Transfer *t = dropped[i].first; t != NULL; t = t->next)
            t->state = DONE;
    pthread_mutex_unlock(&self->mutex);
    for (int i = 0; i < 3; i++)
        for (Transfer *t = dropped[i].first, *next; t != NULL; t = next) {
            next = t->next;
            t->previous = t->next = NULL;
            let_go(t);
        }
}

static PyObject *Queue_close(Queue *self, PyObject *unused)
{
    pthread_mutex_lock(&self->mutex);
    self->closed = true;
    pthread_cond_broadcast(&self->changed);
    pthread_mutex_unlock(&self->mutex);
    drop_queued(self);
    Py_RETURN_NONE;
}

static void Queue_dealloc(Queue *self)
{
    drop_queued(self); /* threads that are in `take` hold a reference, so none is */
    Py_XDECREF(Queue_take_events(self, NULL));
    pthread_mutex_destroy(&self->mutex);
    pthread_cond_destroy(&self->changed);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *Queue_num_idle(Queue *self, void *unused)
{
    pthread_mutex_lock(&self->mutex);
    int num_idle = self->num_idle;
    pthread_mutex_unlock(&self->mutex);
    return PyLong_FromLong(num_idle);
}

static PyObject *Queue_num_hung(Queue *self, void *unused)
{
    pthread_mutex_lock(&self->mutex);
    int num_hung = self->num_hung;
    pthread_mutex_unlock(&self->mutex);
    return PyLong_FromLong(num_hung);
}

static PyObject *Queue_num_parked(Queue *self, void *unused)
{
    pthread_mutex_lock(&self->mutex);
    int num_parked = self->parked.length;
    pthread_mutex_unlock(&self->mutex);
    return PyLong_FromLong(num_parked);
}

static PyObject *Queue_wanted(Queue *self, void *unused)
{
    pthread_mutex_lock(&self->mutex);
    bool wanted = !self->closed && self->loads.length + self->stores.length > self->num_idle;
    pthread_mutex_unlock(&self->mutex);
    return PyBool_FromLong(wanted);
}

static PyMethodDef Queue_methods[] = {
    {"push", (PyCFunction)Queue_push, METH_O, "See fskv.data_path.threads.TaskQueue."},
    {"cancel", (PyCFunction)Queue_cancel, METH_O, "See fskv.data_path.threads.TaskQueue."},
    {"hasten", (PyCFunction)Queue_hasten, METH_O, "See fskv.data_path.threads.TaskQueue."},
    {"release", (PyCFunction)Queue_release, METH_VARARGS, "See fskv.data_path.threads.TaskQueue."},
    {"write_off", (PyCFunction)Queue_write_off, METH_O, "See fskv.data_path.threads.TaskQueue."},
    {"finish", (PyCFunction)Queue_finish, METH_O, "See fskv.data_path.threads.TaskQueue."},
    {"take", (PyCFunction)Queue_take, METH_O,
     "take(slot): run transfers in `slot`; returns one that needs Python, or None: the thread may go."},
    {"take_events", (PyCFunction)Queue_take_events, METH_NOARGS,
     "take_events(): [(owner, GATHERED | STORED | EXISTS | LOADED | ABANDONED | READ, seconds)] since the last "
     "call."},
    {"running", (PyCFunction)Queue_running, METH_NOARGS, "See fskv.data_path.threads.TaskQueue."},
    {"close", (PyCFunction)Queue_close, METH_NOARGS, "See fskv.data_path.threads.TaskQueue."},
    {NULL},
};

static PyGetSetDef Queue_getset[] = {
    {"num_idle", (getter)Queue_num_idle, NULL, NULL, NULL},
    {"num_hung", (getter)Queue_num_hung, NULL, NULL, NULL},
    {"num_parked", (getter)Queue_num_parked, NULL, NULL, NULL},
    {"wants_thread", (getter)Queue_wanted, NULL, NULL, NULL},
    {NULL},
};

PyTypeObject QueueType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "fskv._native.Queue",
    .tp_doc = "Queue(max_stores_beside_loads): see fskv.data_path.threads.TaskQueue.",
    .tp_basicsize = sizeof(Queue),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = Queue_new,
    .tp_dealloc = (destructor)Queue_dealloc,
    .tp_methods = Queue_methods,
    .tp_getset = Queue_getset,
};
