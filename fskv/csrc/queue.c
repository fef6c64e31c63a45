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

typedef enum { GATHERED, STORED, EXISTS, LOADED, LEFT, SPOILT, ENDED } Kind;

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
    int num_loads, num_stores; /* at the disk */
    int max_at_disk, max_stores_beside_loads;
    int num_idle, num_hung;
    bool closed;
    pid_t pid; /* of the process that made it, and has its threads */
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

static void prepend(List *list, Transfer *transfer)
{
    transfer->previous = NULL;
    transfer->next = list->first;
    *(list->first ? &list->first->previous : &list->last) = transfer;
    list->first = transfer;
    list->length++;
}

static List *list_of(Queue *queue, const Transfer *transfer)
{
    if (transfer->state == PARKED)
        return &queue->parked;
    if (transfer->state == QUEUED)
        return transfer->is_load ? &queue->loads : &queue->stores;
    return &queue->running;
}

static int num_queued(const Queue *queue)
{
    return queue->loads.length + queue->stores.length;
}

/* Under the mutex: move it to the end of the list of `state`. */
static void move_to(Queue *queue, Transfer *transfer, State state)
{
    detach(list_of(queue, transfer), transfer);
    transfer->state = state;
    append(list_of(queue, transfer), transfer);
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
        (Event){transfer, kind, last, monotonic_s() - transfer->started_at - transfer->waited_s};
}

/* Under the mutex: the next transfer that may start, or NULL. Loads first; beside them only a few stores. */
static Transfer *pop(Queue *queue)
{
    Transfer *transfer = NULL;
    if (queue->num_loads + queue->num_stores < queue->max_at_disk)
        transfer = queue->loads.first;
    if (transfer == NULL && queue->num_loads + queue->num_stores < queue->max_at_disk &&
        (queue->num_loads == 0 || queue->num_stores < queue->max_stores_beside_loads))
        transfer = queue->stores.first;
    if (transfer == NULL)
        return NULL;
    move_to(queue, transfer, transfer->is_load ? READING : transfer->slot.obj ? WRITING : GATHERING);
    transfer->started_at = transfer->at_disk_since = monotonic_s();
    transfer->counted = true;
    *(transfer->is_load ? &queue->num_loads : &queue->num_stores) += 1;
    if (queue->num_idle > 0 && num_queued(queue) > 0)
        pthread_cond_signal(&queue->changed);
    return transfer;
}

/* Under the mutex: its place at the disk is free, for those that gave way. */
static void leave_disk(Queue *queue, Transfer *transfer)
{
    if (!transfer->counted)
        return;
    transfer->counted = false;
    *(transfer->is_load ? &queue->num_loads : &queue->num_stores) -= 1;
    if (queue->num_idle > 0 && num_queued(queue) > 0)
        pthread_cond_broadcast(&queue->changed);
}

/* Under the mutex: the transfer's thread is free again. Returns whether it had been written off. */
static bool end(Queue *queue, Transfer *transfer)
{
    detach(&queue->running, transfer);
    transfer->state = DONE;
    leave_disk(queue, transfer);
    queue->num_hung -= transfer->written_off;
    return transfer->written_off;
}

/* --- without the interpreter --------------------------------------------------------------- */

/* Ask to touch its pages, on the thread that runs it; false: the job was given up. While a load waits for the gate
 * its place at the disk is another's. */
static bool enter(Queue *queue, Transfer *transfer)
{
    bool waits = transfer->is_load && guard_shut(transfer->guard);
    double since = monotonic_s();
    pthread_mutex_lock(&queue->mutex);
    if (transfer->is_load)
        transfer->state = waits ? WAITING : SCATTERING;
    if (waits)
        leave_disk(queue, transfer);
    pthread_mutex_unlock(&queue->mutex);
    bool entered = guard_enter(transfer->guard);
    if (waits || !entered) {
        pthread_mutex_lock(&queue->mutex);
        transfer->at_disk_since = monotonic_s();
        if (waits)
            transfer->waited_s = transfer->at_disk_since - since;
        transfer->state = entered ? SCATTERING : WRITING; /* a file that is not wanted is closed */
        pthread_mutex_unlock(&queue->mutex);
    }
    return entered;
}

/* Its pages are free. What is left is the disk's. */
static void leave(Queue *queue, Transfer *transfer)
{
    guard_leave(transfer->guard);
    pthread_mutex_lock(&queue->mutex);
    transfer->at_disk_since = monotonic_s();
    transfer->state = WRITING;
    pthread_mutex_unlock(&queue->mutex);
}

/* False: Python goes on with it. */
static bool run_store(Queue *queue, Transfer *transfer, uint8_t *slot, Kind *kind)
{
    if (transfer->state == GATHERING) {
        if (!enter(queue, transfer)) {
            *kind = LEFT;
            return true;
        }
        if (!gather(transfer, slot)) {
            guard_leave(transfer->guard);
            return false;
        }
        leave(queue, transfer);
        pthread_mutex_lock(&queue->mutex);
        add_event(queue, transfer, GATHERED, false);
        pthread_mutex_unlock(&queue->mutex);
    }
    const FileLayout *layout = &transfer->layout->file;
    bool digested = transfer->placement->pages->device == NULL && layout->sealed.keys == NULL;
    ChunkResult result = chunk_write(layout, &transfer->file, slot, digested);
    *kind = result == CHUNK_OK ? STORED : result == CHUNK_SPOILT ? SPOILT : EXISTS;
    return result != CHUNK_OTHERWISE;
}

static bool run_load(Queue *queue, Transfer *transfer, uint8_t *slot, Kind *kind)
{
    int fd, old_mtime;
    if (chunk_read(&transfer->layout->file, &transfer->file, slot, &fd, &old_mtime) != CHUNK_OK)
        return false;
    transfer->old_mtime = old_mtime;
    *kind = LEFT;
    bool entered = enter(queue, transfer), scattered = entered && scatter(transfer, slot);
    if (entered && !scattered)
        guard_leave(transfer->guard);
    if (scattered) {
        *kind = ENDED;
        leave(queue, transfer);
        /* Told before the disk is touched again: what can go wrong there must not spoil a load. */
        pthread_mutex_lock(&queue->mutex);
        add_event(queue, transfer, LOADED, false);
        pthread_mutex_unlock(&queue->mutex);
        if (old_mtime && transfer->file.use_ns != NULL)
            stamp_use(fd, NULL, transfer->file.use_ns, transfer->file.depth, false);
        else if (old_mtime)
            (void)futimens(fd, NULL);
    }
    close(fd);
    return scattered || !entered;
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

        Kind kind;
        bool over = transfer->is_load ? run_load(queue, transfer, buffer, &kind)
                                      : run_store(queue, transfer, buffer, &kind);
        if (!over)
            return transfer;
        pthread_mutex_lock(&queue->mutex);
        bool written_off = end(queue, transfer);
        add_event(queue, transfer, kind, true);
        /* From here on the transfer belongs to whoever collects its event. */
        pthread_mutex_unlock(&queue->mutex);
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
    int max_at_disk, max_stores_beside_loads;
    if (!PyArg_ParseTuple(args, "ii:Queue", &max_at_disk, &max_stores_beside_loads))
        return NULL;
    Queue *self = (Queue *)type->tp_alloc(type, 0);
    if (self != NULL) {
        pthread_mutex_init(&self->mutex, NULL);
        pthread_cond_init(&self->changed, NULL);
        self->max_at_disk = max_at_disk;
        self->max_stores_beside_loads = max_stores_beside_loads;
        self->pid = getpid();
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

static PyObject *Queue_push(Queue *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"transfers", "parked", "first", NULL};
    PyObject *tasks;
    int parked = 0, first = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!|$pp:push", names, &PyList_Type, &tasks, &parked, &first))
        return NULL;
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
        for (transfer->spare_refs = 0; transfer->spare_refs < 2; transfer->spare_refs++)
            Py_INCREF(transfer);
    }
    /* One lock and one wake-up for all: the caller holds the interpreter, and each may cost it its CPU. The thread
     * that is woken wakes the next. */
    bool wanted = false, dropped = self->pid != getpid(); /* a forked child would wait for threads it has not */
    if (!dropped) {
        pthread_mutex_lock(&self->mutex);
        dropped = self->closed;
        for (Py_ssize_t i = 0; i < n && !dropped; i++) {
            Transfer *transfer = (Transfer *)PyList_GET_ITEM(tasks, i);
            transfer->state = parked ? PARKED : QUEUED;
            transfer->queue = self;
            (first ? prepend : append)(list_of(self, transfer), transfer);
        }
        if (n > 0 && !dropped && self->num_idle > 0)
            pthread_cond_signal(&self->changed);
        wanted = !dropped && num_queued(self) > self->num_idle;
        pthread_mutex_unlock(&self->mutex);
    }
    for (Py_ssize_t i = 0; i < n && dropped; i++)
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
        detach(list_of(self, transfer), transfer);
        transfer->state = DONE;
    }
    pthread_mutex_unlock(&self->mutex);
    if (queued)
        let_go(transfer);
    return PyBool_FromLong(queued);
}

static PyObject *Queue_release(Queue *self, PyObject *tasks)
{
    if (!PyList_Check(tasks))
        return PyErr_Format(PyExc_TypeError, "release: expected a list of Transfers");
    Py_ssize_t n = PyList_GET_SIZE(tasks);
    for (Py_ssize_t i = 0; i < n; i++)
        if (!is_transfer(PyList_GET_ITEM(tasks, i)))
            return NULL;
    pthread_mutex_lock(&self->mutex);
    for (Py_ssize_t i = 0; i < n; i++) {
        Transfer *transfer = (Transfer *)PyList_GET_ITEM(tasks, i);
        if (transfer->state == PARKED && transfer->queue == self)
            move_to(self, transfer, QUEUED);
    }
    if (n > 0 && self->num_idle > 0)
        pthread_cond_signal(&self->changed);
    bool wanted = !self->closed && num_queued(self) > self->num_idle;
    pthread_mutex_unlock(&self->mutex);
    return PyBool_FromLong(wanted);
}

static bool is_running(const Queue *self, const Transfer *transfer)
{
    return transfer->state > QUEUED && transfer->state < DONE && transfer->queue == self;
}

static PyObject *Queue_enter(Queue *self, PyObject *object)
{
    if (!is_transfer(object))
        return NULL;
    Transfer *transfer = (Transfer *)object;
    bool entered = false;
    if (!is_running(self, transfer)) /* its thread calls, so the answer stays true */
        return PyErr_Format(PyExc_ValueError, "enter: this transfer is not running");
    Py_BEGIN_ALLOW_THREADS
    entered = enter(self, transfer);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(entered);
}

static PyObject *Queue_leave(Queue *self, PyObject *object)
{
    if (!is_transfer(object))
        return NULL;
    leave(self, (Transfer *)object);
    Py_RETURN_NONE;
}

static PyObject *Queue_write_off(Queue *self, PyObject *object)
{
    if (!is_transfer(object))
        return NULL;
    Transfer *transfer = (Transfer *)object;
    pthread_mutex_lock(&self->mutex);
    bool now = is_running(self, transfer) && !transfer->written_off;
    if (now) {
        transfer->written_off = true;
        self->num_hung++;
        leave_disk(self, transfer); /* a call that hangs holds nobody back */
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
    bool running = is_running(self, transfer);
    bool written_off = running && end(self, transfer);
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

static PyObject *Queue_wanted(Queue *self, void *unused)
{
    pthread_mutex_lock(&self->mutex);
    bool wanted = !self->closed && num_queued(self) > self->num_idle;
    pthread_mutex_unlock(&self->mutex);
    return PyBool_FromLong(wanted);
}

static PyMethodDef Queue_methods[] = {
    {"push", (PyCFunction)(void (*)(void))Queue_push, METH_VARARGS | METH_KEYWORDS,
     "push(transfers, parked=False, first=False): queue them; returns `wants_thread`."},
    {"cancel", (PyCFunction)Queue_cancel, METH_O, "cancel(transfer): take it back; False: a thread has it."},
    {"release", (PyCFunction)Queue_release, METH_O, "release(transfers): queue the parked ones; `wants_thread`."},
    {"enter", (PyCFunction)Queue_enter, METH_O,
     "enter(transfer): wait for its job's gate; False: the job was given up. Pair with `leave`."},
    {"leave", (PyCFunction)Queue_leave, METH_O, "leave(transfer): its thread is done with the pages."},
    {"write_off", (PyCFunction)Queue_write_off, METH_O,
     "write_off(transfer): count its thread as hung until it ends; False: it has none."},
    {"finish", (PyCFunction)Queue_finish, METH_O,
     "finish(transfer): end one that `take` returned; whether it had been written off."},
    {"take", (PyCFunction)Queue_take, METH_O,
     "take(slot): run transfers in `slot`; returns one that needs Python, or None: the thread may go."},
    {"take_events", (PyCFunction)Queue_take_events, METH_NOARGS,
     "take_events(): [(owner, GATHERED | STORED | EXISTS | LOADED | LEFT | SPOILT, seconds)] since the last call."},
    {"running", (PyCFunction)Queue_running, METH_NOARGS, "running(): the transfers that have a thread."},
    {"close", (PyCFunction)Queue_close, METH_NOARGS, "close(): drop all that is queued; threads may go."},
    {NULL},
};

static PyGetSetDef Queue_getset[] = {
    {"num_idle", (getter)Queue_num_idle, NULL, "Threads that wait in `take`.", NULL},
    {"num_hung", (getter)Queue_num_hung, NULL, "Threads that were written off and have not come back.", NULL},
    {"wants_thread", (getter)Queue_wanted, NULL, "Whether more is queued than idle threads will take.", NULL},
    {NULL},
};

PyTypeObject QueueType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "fskv._native.Queue",
    .tp_doc = "Queue(max_at_disk, max_stores_beside_loads): what I/O threads run, loads before stores.",
    .tp_basicsize = sizeof(Queue),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = Queue_new,
    .tp_dealloc = (destructor)Queue_dealloc,
    .tp_methods = Queue_methods,
    .tp_getset = Queue_getset,
};
