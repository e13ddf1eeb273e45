/* The system calls of a transport; modelserver/wire/sockets/calls.py says what each is for, and has the same in Python.
 *
 * Nothing here releases the interpreter's lock, except to wait on purpose: these calls return at once, and a worker that
 * waits for the lock would be woken for a few microseconds each time. No state is kept. Only the stable ABI is used, as
 * in the accelerator.
 */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <errno.h>
#include <limits.h>
#include <stdint.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>

#define MAX_READY 64

/* Names of methods, and the size passed to `get_buffer`. */
static PyObject *get_buffer, *buffer_updated, *ready, *fail, *lose, *any_size;

/* ---- Arguments and results ---------------------------------------------------------------------------------------- */

static int has_args(const char *name, Py_ssize_t num_args, Py_ssize_t num_wanted)
{
    if (num_args == num_wanted)
        return 1;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, got %zd", name, num_wanted, num_args);
    return 0;
}

/* -1 with an exception set if the object is not a descriptor. */
static int descriptor_of(PyObject *number)
{
    long descriptor = PyLong_AsLong(number);
    if (descriptor == -1 && PyErr_Occurred())
        return -1;
    if (descriptor < 0 || descriptor > INT_MAX) {
        PyErr_Format(PyExc_ValueError, "expected a file descriptor, got %ld", descriptor);
        return -1;
    }
    return (int)descriptor;
}

static int would_wait(int error)
{
    return error == EAGAIN || error == EWOULDBLOCK || error == EINTR;
}

/* The number of bytes that a call has handled; `nothing` where it would have had to wait. */
static PyObject *outcome(ssize_t num_bytes, int error, long nothing)
{
    if (num_bytes >= 0)
        return PyLong_FromSsize_t(num_bytes);
    if (would_wait(error))
        return PyLong_FromLong(nothing);
    errno = error;
    return PyErr_SetFromErrno(PyExc_OSError);
}

/* ---- Bytes -------------------------------------------------------------------------------------------------------- */

static PyObject *receive(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    Py_buffer buffer;
    (void)module;
    if (!has_args("receive", num_args, 2))
        return NULL;
    int descriptor = descriptor_of(args[0]);
    if (descriptor < 0 || PyObject_GetBuffer(args[1], &buffer, PyBUF_WRITABLE) < 0)
        return NULL;
    ssize_t num_bytes = recv(descriptor, buffer.buf, (size_t)buffer.len, MSG_DONTWAIT);
    int error = errno;
    PyBuffer_Release(&buffer);
    return outcome(num_bytes, error, -1);
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static PyObject *receive_soon(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    Py_buffer buffer;
    (void)module;
    if (!has_args("receive_soon", num_args, 3))
        return NULL;
    int descriptor = descriptor_of(args[0]);
    if (descriptor < 0)
        return NULL;
    long patience_ns = PyLong_AsLong(args[2]);
    if (PyErr_Occurred() || PyObject_GetBuffer(args[1], &buffer, PyBUF_WRITABLE) < 0)
        return NULL;
    ssize_t num_bytes;
    int error;
    Py_BEGIN_ALLOW_THREADS
    int64_t end_ns = now_ns() + patience_ns;
    do {
        num_bytes = recv(descriptor, buffer.buf, (size_t)buffer.len, MSG_DONTWAIT);
        error = errno;
    } while (num_bytes < 0 && would_wait(error) && now_ns() < end_ns);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&buffer);
    return outcome(num_bytes, error, -1);
}

static PyObject *transmit(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    Py_buffer data;
    (void)module;
    if (!has_args("transmit", num_args, 2))
        return NULL;
    int descriptor = descriptor_of(args[0]);
    if (descriptor < 0 || PyObject_GetBuffer(args[1], &data, PyBUF_SIMPLE) < 0)
        return NULL;
    ssize_t num_bytes = send(descriptor, data.buf, (size_t)data.len, MSG_DONTWAIT | MSG_NOSIGNAL);
    int error = errno;
    PyBuffer_Release(&data);
    return outcome(num_bytes, error, 0);
}

/* ---- Sockets that are ready ---------------------------------------------------------------------------------------
 *
 * A watcher is a pair: a transport, and the protocol that it reads for, or None. Bytes alone go straight to the
 * protocol. The transport handles everything else, including an exception that the protocol raises. The functions return
 * -1 with an exception set that is meant for the loop, such as a KeyboardInterrupt. The remaining sockets are still ready
 * in the next turn.
 */

static int tell(PyObject *transport, PyObject *method, PyObject *about)
{
    PyObject *done = about == NULL ? NULL : PyObject_CallMethodObjArgs(transport, method, about, NULL);
    Py_XDECREF(about);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Report the exception that is set. */
static int tell_raised(PyObject *transport, PyObject *method)
{
    PyObject *type, *value, *traceback;
    if (!PyErr_ExceptionMatches(PyExc_Exception))
        return -1;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != NULL)
        PyException_SetTraceback(value, traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return tell(transport, method, value);
}

static int deliver(int descriptor, PyObject *transport, PyObject *protocol)
{
    Py_buffer buffer;
    PyObject *room = PyObject_CallMethodObjArgs(protocol, get_buffer, any_size, NULL);
    if (room == NULL || PyObject_GetBuffer(room, &buffer, PyBUF_WRITABLE) < 0) {
        Py_XDECREF(room);
        return tell_raised(transport, fail);
    }
    ssize_t size = buffer.len, num_bytes = recv(descriptor, buffer.buf, (size_t)size, MSG_DONTWAIT);
    int error = errno;
    PyBuffer_Release(&buffer);
    Py_DECREF(room);
    if (size == 0) {
        PyErr_SetString(PyExc_RuntimeError, "get_buffer() returned an empty buffer");
        return tell_raised(transport, fail);
    }
    if (num_bytes < 0) {
        if (would_wait(error))
            return 0;
        errno = error;
        PyErr_SetFromErrno(PyExc_OSError);
        return tell_raised(transport, lose);
    }
    if (num_bytes > 0) {
        PyObject *number = PyLong_FromSsize_t(num_bytes);
        PyObject *done = number == NULL ? NULL : PyObject_CallMethodObjArgs(protocol, buffer_updated, number, NULL);
        Py_XDECREF(number);
        if (done == NULL)
            return tell_raised(transport, fail);
        Py_DECREF(done);
    }
    /* The end of the stream, or there may be more. */
    return num_bytes == 0 || num_bytes == size ? tell(transport, ready, PyLong_FromLong(EPOLLIN)) : 0;
}

static int serve_watcher(int descriptor, uint32_t events, PyObject *watcher)
{
    if (!PyTuple_Check(watcher) || PyTuple_Size(watcher) != 2) {
        PyErr_SetString(PyExc_TypeError, "expected a transport and its protocol or None as the watcher of a socket");
        return -1;
    }
    PyObject *transport = PyTuple_GetItem(watcher, 0), *protocol = PyTuple_GetItem(watcher, 1);
    Py_INCREF(watcher); /* it may be replaced meanwhile */
    int status = events == EPOLLIN && protocol != Py_None ? deliver(descriptor, transport, protocol)
                                                          : tell(transport, ready, PyLong_FromUnsignedLong(events));
    Py_DECREF(watcher);
    return status;
}

/* Other events of a socket: its end, an error, or more bytes. uvloop stops watching a socket once it was reset, and
 * the last bytes arrive together with the reset that follows them. */
static int serve_rest(int descriptor, PyObject *transport)
{
    char byte;
    ssize_t num_bytes = recv(descriptor, &byte, 1, MSG_DONTWAIT | MSG_PEEK);
    if (num_bytes >= 0)
        return tell(transport, ready, PyLong_FromLong(EPOLLIN));
    if (would_wait(errno))
        return 0;
    PyErr_SetFromErrno(PyExc_OSError);
    return tell_raised(transport, lose);
}

static PyObject *serve_one(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    (void)module;
    if (!has_args("serve_one", num_args, 2))
        return NULL;
    int descriptor = descriptor_of(args[0]);
    if (descriptor < 0 || serve_watcher(descriptor, EPOLLIN, args[1]) < 0)
        return NULL;
    /* Its descriptor stays open until the loop's next turn, whatever was done. */
    if (serve_rest(descriptor, PyTuple_GetItem(args[1], 0)) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *serve(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    struct epoll_event events[MAX_READY];
    (void)module;
    if (!has_args("serve", num_args, 2))
        return NULL;
    int descriptor = PyObject_AsFileDescriptor(args[0]);
    if (descriptor < 0)
        return NULL;
    int num_ready = epoll_wait(descriptor, events, MAX_READY, 0);
    if (num_ready < 0 && errno != EINTR)
        return PyErr_SetFromErrno(PyExc_OSError);
    for (int i = 0; i < num_ready; i++) {
        PyObject *key = PyLong_FromLong(events[i].data.fd);
        if (key == NULL)
            return NULL;
        PyObject *watcher = PyDict_GetItemWithError(args[1], key);
        Py_DECREF(key);
        /* An earlier one of this turn may have closed it. */
        if (watcher == NULL ? PyErr_Occurred() != NULL : serve_watcher(events[i].data.fd, events[i].events, watcher) < 0)
            return NULL;
    }
    Py_RETURN_NONE;
}

/* ---- The module --------------------------------------------------------------------------------------------------- */

#define FAST(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}

static PyMethodDef methods[] = {
    FAST(receive),
    FAST(receive_soon),
    FAST(transmit),
    FAST(serve_one),
    FAST(serve),
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_calls", "See calls.py.", -1, methods, NULL, NULL, NULL, NULL,
};

static int make_constants(void)
{
    get_buffer = PyUnicode_InternFromString("get_buffer");
    buffer_updated = PyUnicode_InternFromString("buffer_updated");
    ready = PyUnicode_InternFromString("ready");
    fail = PyUnicode_InternFromString("fail");
    lose = PyUnicode_InternFromString("lose");
    any_size = PyLong_FromLong(-1);
    return get_buffer != NULL && buffer_updated != NULL && ready != NULL && fail != NULL && lose != NULL &&
           any_size != NULL;
}

PyMODINIT_FUNC PyInit__calls(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && !make_constants())
        Py_CLEAR(module);
#ifdef SOURCE_DIGEST
    if (module != NULL && PyModule_AddStringConstant(module, "SOURCE_DIGEST", SOURCE_DIGEST) < 0)
        Py_CLEAR(module);
#endif
    return module;
}
