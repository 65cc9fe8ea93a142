// What every request of a BatchQueue passes through, in C++: orchard.serving.express takes these
// classes instead of those of orchard/serving/tickets.py, which say what each is for.
//
// Everything here runs with the interpreter's lock held, and gives it up only to wait. So what is
// one step here is one step for all threads, and a signal handler comes before it or after it.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <cstddef>
#include <cstring>

#ifdef Py_GIL_DISABLED
#error "without the interpreter's lock orchard/serving/tickets.py serves"
#endif

namespace {

// A reference that is given back at the end of its block.
class Ref {
 public:
  Ref() = default;
  explicit Ref(PyObject *owned) : object_(owned) {}
  Ref(const Ref &) = delete;
  Ref &operator=(const Ref &) = delete;
  ~Ref() { Py_XDECREF(object_); }
  PyObject *get() const { return object_; }
  PyObject *release() {
    PyObject *object = object_;
    object_ = nullptr;
    return object;
  }
  void take(PyObject *owned) {
    PyObject *before = object_;
    object_ = owned;
    Py_XDECREF(before);
  }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject *object_ = nullptr;
};

PyObject *new_ref(PyObject *object) {
  Py_XINCREF(object);
  return object;
}

void assign(PyObject *&field, PyObject *owned) {
  PyObject *before = field;
  field = owned;
  Py_XDECREF(before);
}

bool is_none(PyObject *object) { return object == nullptr || object == Py_None; }

// Names of attributes and methods, and the values that states and places have in Python.
struct Known {
  PyObject *acquire, *append, *count, *device, *dtype, *layout, *notify, *popleft, *release, *shape,
      *slow_result;
  PyObject *pending, *running, *finished;                   // of concurrent.futures
  PyObject *arrived_place, *running_place, *settled_place;  // of tickets.Place
};
Known known;
PyTypeObject *parcel_type, *sleepers_type, *ticket_type, *desk_type, *entrance_type;

PyObject *allocate(PyTypeObject *type) {
  return reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc))(type, 0);
}

void deallocate(PyObject *object) {
  PyTypeObject *type = Py_TYPE(object);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

template <typename Function>
void *slot(Function *function) {
  return reinterpret_cast<void *>(function);
}

template <typename Function>
PyCFunction method(Function *function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

enum class Passed { yes, no, failed };  // failed: with an error, of a signal handler

// Take the lock. For ever, if the time is negative, but for what a signal handler raises.
Passed wait_for(PyThread_type_lock lock, PY_TIMEOUT_T microseconds) {
  if (PyThread_acquire_lock_timed(lock, 0, 0) == PY_LOCK_ACQUIRED) return Passed::yes;
  for (;;) {
    PyLockStatus status;
    Py_BEGIN_ALLOW_THREADS;
    status = PyThread_acquire_lock_timed(lock, microseconds, microseconds < 0);
    Py_END_ALLOW_THREADS;
    if (status == PY_LOCK_ACQUIRED) return Passed::yes;
    if (status == PY_LOCK_FAILURE) return Passed::no;
    if (PyErr_CheckSignals() < 0) return Passed::failed;
  }
}

PyThread_type_lock new_shut_lock() {
  PyThread_type_lock lock = PyThread_allocate_lock();
  if (lock == nullptr) {
    PyErr_NoMemory();
  } else {
    PyThread_acquire_lock(lock, NOWAIT_LOCK);
  }
  return lock;
}

// Parcel

struct Parcel {
  PyObject_HEAD PyObject *leaves, *spec, *group, *device, *outside;
  Py_ssize_t rows, length;
  char is_there;
};

Parcel *as_parcel(PyObject *object) { return reinterpret_cast<Parcel *>(object); }

int parcel_init(PyObject *object, PyObject *args, PyObject *named) {
  Parcel *self = as_parcel(object);
  static const char *names[] = {"leaves", "spec",    "rows",     "group", "length",
                                "device", "outside", "is_there", nullptr};
  PyObject *leaves, *spec, *group, *device = Py_None, *outside = Py_None;
  Py_ssize_t rows, length = 0;
  int is_there = 0;
  if (!PyArg_ParseTupleAndKeywords(args, named, "O!OnO|nOOp", const_cast<char **>(names),
                                   &PyTuple_Type, &leaves, &spec, &rows, &group, &length, &device,
                                   &outside, &is_there)) {
    return -1;
  }
  assign(self->leaves, new_ref(leaves));
  assign(self->spec, new_ref(spec));
  assign(self->group, new_ref(group));
  assign(self->device, new_ref(device));
  assign(self->outside, new_ref(outside));
  self->rows = rows;
  self->length = length;
  self->is_there = static_cast<char>(is_there);
  return 0;
}

int parcel_traverse(PyObject *object, visitproc visit, void *arg) {
  Parcel *self = as_parcel(object);
  Py_VISIT(self->leaves);
  Py_VISIT(self->spec);
  Py_VISIT(self->group);
  Py_VISIT(self->device);
  Py_VISIT(self->outside);
  Py_VISIT(Py_TYPE(object));
  return 0;
}

int parcel_clear(PyObject *object) {
  Parcel *self = as_parcel(object);
  Py_CLEAR(self->leaves);
  Py_CLEAR(self->spec);
  Py_CLEAR(self->group);
  Py_CLEAR(self->device);
  Py_CLEAR(self->outside);
  return 0;
}

void parcel_dealloc(PyObject *object) {
  PyObject_GC_UnTrack(object);
  parcel_clear(object);
  deallocate(object);
}

PyMemberDef parcel_members[] = {
    {"leaves", T_OBJECT_EX, offsetof(Parcel, leaves), 0, nullptr},
    {"spec", T_OBJECT_EX, offsetof(Parcel, spec), 0, nullptr},
    {"rows", T_PYSSIZET, offsetof(Parcel, rows), 0, nullptr},
    {"group", T_OBJECT_EX, offsetof(Parcel, group), 0, nullptr},
    {"length", T_PYSSIZET, offsetof(Parcel, length), 0, nullptr},
    {"device", T_OBJECT, offsetof(Parcel, device), 0, nullptr},
    {"outside", T_OBJECT, offsetof(Parcel, outside), 0, nullptr},
    {"is_there", T_BOOL, offsetof(Parcel, is_there), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot parcel_slots[] = {
    {Py_tp_init, slot(parcel_init)},   {Py_tp_traverse, slot(parcel_traverse)},
    {Py_tp_clear, slot(parcel_clear)}, {Py_tp_dealloc, slot(parcel_dealloc)},
    {Py_tp_members, parcel_members},   {0, nullptr},
};
PyType_Spec parcel_spec = {"orchard.serving._express.Parcel", sizeof(Parcel), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, parcel_slots};

// Ticket

struct Ticket {
  PyObject_HEAD PyObject *parcel, *runner, *owner;
  PyObject *state, *result, *exception, *claimed;
  PyObject *place, *outcome, *wave, *deadline, *admission;
  PyObject *condition, *waiters, *callbacks;  // made when something asks for them
  PyThread_type_lock gate;
  double arrival;
  Py_ssize_t number;
  int priority;
  char is_open, is_awaited;
};

Ticket *as_ticket(PyObject *object) { return reinterpret_cast<Ticket *>(object); }

bool is_ticket(PyObject *object) {
  if (PyObject_TypeCheck(object, ticket_type)) return true;
  PyErr_Format(PyExc_TypeError, "expected a Ticket, got %R", object);
  return false;
}

PyObject *ticket_new(PyTypeObject *type, PyObject *, PyObject *) {
  Ref object(allocate(type));
  if (!object) return nullptr;
  Ticket *self = as_ticket(object.get());
  self->state = new_ref(known.pending);
  self->place = new_ref(known.arrived_place);
  self->gate = new_shut_lock();
  return self->gate == nullptr ? nullptr : object.release();
}

int ticket_init(PyObject *object, PyObject *args, PyObject *named) {
  Ticket *self = as_ticket(object);
  static const char *names[] = {"parcel", "runner", "priority", "owner", nullptr};
  PyObject *parcel, *runner, *owner;
  int priority;
  if (!PyArg_ParseTupleAndKeywords(args, named, "OOiO", const_cast<char **>(names), &parcel,
                                   &runner, &priority, &owner)) {
    return -1;
  }
  assign(self->parcel, new_ref(parcel));
  assign(self->runner, new_ref(runner));
  assign(self->owner, new_ref(owner));
  self->priority = priority;
  return 0;
}

int ticket_traverse(PyObject *object, visitproc visit, void *arg) {
  Ticket *self = as_ticket(object);
  PyObject *fields[] = {self->parcel,    self->runner,    self->owner,    self->state,
                        self->result,    self->exception, self->claimed,  self->place,
                        self->outcome,   self->wave,      self->deadline, self->admission,
                        self->condition, self->waiters,   self->callbacks};
  for (PyObject *field : fields) Py_VISIT(field);
  Py_VISIT(Py_TYPE(object));
  return 0;
}

int ticket_clear(PyObject *object) {
  Ticket *self = as_ticket(object);
  PyObject **fields[] = {&self->parcel,    &self->runner,    &self->owner,    &self->state,
                         &self->result,    &self->exception, &self->claimed,  &self->place,
                         &self->outcome,   &self->wave,      &self->deadline, &self->admission,
                         &self->condition, &self->waiters,   &self->callbacks};
  for (PyObject **field : fields) assign(*field, nullptr);
  return 0;
}

void ticket_dealloc(PyObject *object) {
  PyObject_GC_UnTrack(object);
  ticket_clear(object);
  if (as_ticket(object)->gate != nullptr) PyThread_free_lock(as_ticket(object)->gate);
  deallocate(object);
}

void open_gate(Ticket *self) {
  if (!self->is_open) {
    self->is_open = 1;
    PyThread_release_lock(self->gate);
  }
}

PyObject *ticket_open(PyObject *object, PyObject *) {
  open_gate(as_ticket(object));
  Py_RETURN_NONE;
}

// Where it is kept, if the name is one of those that are made at the first question.
PyObject **made_field(Ticket *self, PyObject *name) {
  struct {
    const char *name;
    PyObject **field;
  } const fields[] = {{"_condition", &self->condition},
                      {"_waiters", &self->waiters},
                      {"_done_callbacks", &self->callbacks},
                      {"_claimed", &self->claimed}};
  for (const auto &each : fields) {
    if (PyUnicode_Check(name) && PyUnicode_CompareWithASCIIString(name, each.name) == 0) {
      return each.field;
    }
  }
  PyErr_Format(PyExc_AttributeError, "%R", name);
  return nullptr;
}

PyObject *ticket_made(PyObject *object, PyObject *args) {
  PyObject *name, *value;
  if (!PyArg_ParseTuple(args, "OO", &name, &value)) return nullptr;
  PyObject **field = made_field(as_ticket(object), name);
  if (field == nullptr) return nullptr;
  if (is_none(*field)) assign(*field, new_ref(value));
  return new_ref(*field);
}

PyObject *ticket_peek(PyObject *object, PyObject *name) {
  PyObject **field = made_field(as_ticket(object), name);
  if (field == nullptr) return nullptr;
  return new_ref(*field == nullptr ? Py_None : *field);
}

PyObject *ticket_begin_again(PyObject *object, PyObject *) {
  Ticket *self = as_ticket(object);
  PyThread_type_lock gate = new_shut_lock();
  if (gate == nullptr) return nullptr;
  self->gate = gate;  // the one before is left to whoever may have it
  self->is_open = 0;
  assign(self->condition, nullptr);
  assign(self->waiters, nullptr);
  assign(self->callbacks, nullptr);
  Py_RETURN_NONE;
}

bool claim(Ticket *self, PyObject *state) {
  if (is_none(self->claimed)) assign(self->claimed, new_ref(state));
  return self->claimed == state;
}

PyObject *ticket_claim(PyObject *object, PyObject *state) {
  return PyBool_FromLong(claim(as_ticket(object), state));
}

PyObject *ticket_begin(PyObject *object, PyObject *) {
  Ticket *self = as_ticket(object);
  if (!claim(self, known.running)) Py_RETURN_FALSE;
  if (self->state != known.pending && self->state != known.running) Py_RETURN_FALSE;
  assign(self->state, new_ref(known.running));
  Py_RETURN_TRUE;
}

void settle(Ticket *self, PyObject *outcome) {
  assign(self->outcome, new_ref(outcome));
  assign(self->place, new_ref(known.settled_place));
  assign(self->parcel, nullptr);
  assign(self->runner, nullptr);
}

PyObject *ticket_settle(PyObject *object, PyObject *outcome) {
  settle(as_ticket(object), outcome);
  Py_RETURN_NONE;
}

// Sleepers

struct Sleepers {
  PyObject_HEAD PyObject **line;
  Py_ssize_t capacity, added, woken;
  PyThread_type_lock over;
  char is_over;
};

Sleepers *as_sleepers(PyObject *object) { return reinterpret_cast<Sleepers *>(object); }

bool is_sleepers(PyObject *object) {
  if (PyObject_TypeCheck(object, sleepers_type)) return true;
  PyErr_Format(PyExc_TypeError, "expected Sleepers, got %R", object);
  return false;
}

PyObject *sleepers_new(PyTypeObject *type, PyObject *, PyObject *) {
  Ref object(allocate(type));
  if (!object) return nullptr;
  as_sleepers(object.get())->over = new_shut_lock();
  return as_sleepers(object.get())->over == nullptr ? nullptr : object.release();
}

int sleepers_traverse(PyObject *object, visitproc visit, void *arg) {
  Sleepers *self = as_sleepers(object);
  for (Py_ssize_t n = self->woken; n < self->added; ++n) Py_VISIT(self->line[n]);
  Py_VISIT(Py_TYPE(object));
  return 0;
}

// Wakes who is next in line, if there is one.
bool wake_next(Sleepers *self) {
  if (self->woken == self->added) return false;
  Ref next(self->line[self->woken++]);
  open_gate(as_ticket(next.get()));
  return true;
}

int sleepers_clear(PyObject *object) {
  while (wake_next(as_sleepers(object))) {
  }
  return 0;
}

void sleepers_dealloc(PyObject *object) {
  PyObject_GC_UnTrack(object);
  sleepers_clear(object);
  Sleepers *self = as_sleepers(object);
  PyMem_Free(self->line);
  if (self->over != nullptr) PyThread_free_lock(self->over);
  deallocate(object);
}

Py_ssize_t sleepers_length(PyObject *object) { return as_sleepers(object)->added; }

PyObject *sleepers_left(PyObject *object, void *) {
  return PyLong_FromSsize_t(as_sleepers(object)->added - as_sleepers(object)->woken);
}

bool add(Sleepers *self, Ticket *ticket) {
  if (self->added == self->capacity) {
    Py_ssize_t capacity = self->capacity == 0 ? 64 : 2 * self->capacity;
    void *line = PyMem_Realloc(self->line, static_cast<size_t>(capacity) * sizeof(PyObject *));
    if (line == nullptr) return false;
    self->line = static_cast<PyObject **>(line);
    self->capacity = capacity;
  }
  self->line[self->added++] = new_ref(reinterpret_cast<PyObject *>(ticket));
  assign(ticket->wave, new_ref(reinterpret_cast<PyObject *>(self)));
  return true;
}

PyObject *sleepers_add(PyObject *object, PyObject *ticket) {
  if (!is_ticket(ticket)) return nullptr;
  if (!add(as_sleepers(object), as_ticket(ticket))) return PyErr_NoMemory();
  Py_RETURN_NONE;
}

void pass_on(Sleepers *self) {
  if (!wake_next(self) && !self->is_over) {
    self->is_over = 1;
    PyThread_release_lock(self->over);
  }
}

PyObject *sleepers_pass_on(PyObject *object, PyObject *) {
  pass_on(as_sleepers(object));
  Py_RETURN_NONE;
}

PyObject *sleepers_wait(PyObject *object, PyObject *argument) {
  double seconds = PyFloat_AsDouble(argument);
  if (seconds == -1.0 && PyErr_Occurred()) return nullptr;
  constexpr double longest = 1e9;  // seconds
  if (!(seconds > 0)) seconds = 0;
  auto microseconds = static_cast<PY_TIMEOUT_T>(1e6 * (seconds < longest ? seconds : longest));
  switch (wait_for(as_sleepers(object)->over, microseconds)) {
    case Passed::yes:
      Py_RETURN_TRUE;
    case Passed::no:
      Py_RETURN_FALSE;
    case Passed::failed:
      break;
  }
  return nullptr;
}

PyObject *sleepers_end(PyObject *object, PyObject *) {
  sleepers_clear(object);
  Py_RETURN_NONE;
}

PyMethodDef sleepers_methods[] = {
    {"add", sleepers_add, METH_O, nullptr},   {"pass_on", sleepers_pass_on, METH_NOARGS, nullptr},
    {"wait", sleepers_wait, METH_O, nullptr}, {"end", sleepers_end, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyGetSetDef sleepers_properties[] = {
    {"left", sleepers_left, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};
PyType_Slot sleepers_slots[] = {
    {Py_tp_new, slot(sleepers_new)},       {Py_tp_traverse, slot(sleepers_traverse)},
    {Py_tp_clear, slot(sleepers_clear)},   {Py_tp_dealloc, slot(sleepers_dealloc)},
    {Py_sq_length, slot(sleepers_length)}, {Py_tp_methods, sleepers_methods},
    {Py_tp_getset, sleepers_properties},   {0, nullptr},
};
PyType_Spec sleepers_spec = {"orchard.serving._express.Sleepers", sizeof(Sleepers), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
                             sleepers_slots};

// A ticket's result, and how it is filled

bool announce_plainly(Ticket *self, Sleepers *wave) {
  Ref outcome(new_ref(self->outcome));
  bool has_outcome =
      !is_none(outcome.get()) && PyTuple_Check(outcome.get()) && PyTuple_Size(outcome.get()) == 2;
  if (!has_outcome || self->condition != nullptr || self->state != known.running) return false;
  Ref before(self->result), error_before(self->exception);
  self->result = new_ref(PyTuple_GetItem(outcome.get(), 0));
  self->exception = new_ref(PyTuple_GetItem(outcome.get(), 1));
  assign(self->state, new_ref(known.finished));
  assign(self->outcome, nullptr);
  if (wave == nullptr || !self->is_awaited || !add(wave, self)) open_gate(self);
  return true;
}

PyObject *ticket_announce_plainly(PyObject *object, PyObject *wave) {
  if (wave != Py_None && !is_sleepers(wave)) return nullptr;
  return PyBool_FromLong(
      announce_plainly(as_ticket(object), wave == Py_None ? nullptr : as_sleepers(wave)));
}

PyObject *ticket_result(PyObject *object, PyObject *const *args, Py_ssize_t count,
                        PyObject *names) {
  Ticket *self = as_ticket(object);
  Py_ssize_t named = names == nullptr ? 0 : PyTuple_Size(names);
  bool is_timeout =
      named == 0 || PyUnicode_CompareWithASCIIString(PyTuple_GetItem(names, 0), "timeout") == 0;
  if (count + named > 1 || !is_timeout) {
    PyErr_SetString(PyExc_TypeError, "result() takes one argument, timeout");
    return nullptr;
  }
  PyObject *timeout = count + named == 0 ? Py_None : args[0];
  if (timeout == Py_None && !self->is_open) {
    self->is_awaited = 1;
    Passed passed = Passed::yes;
    if (self->state != known.finished) {
      PyThread_type_lock gate = self->gate;
      passed = wait_for(gate, -1);
      if (passed == Passed::yes) PyThread_release_lock(gate);  // for whoever waits as well
    }
    Ref wave(self->wave);
    self->wave = nullptr;
    if (wave && PyObject_TypeCheck(wave.get(), sleepers_type)) pass_on(as_sleepers(wave.get()));
    if (passed != Passed::yes) return nullptr;
  }
  if (self->state == known.finished && is_none(self->exception)) {
    return new_ref(self->result == nullptr ? Py_None : self->result);
  }
  return PyObject_CallMethodObjArgs(object, known.slow_result, timeout, nullptr);
}

PyMemberDef ticket_members[] = {
    {"parcel", T_OBJECT_EX, offsetof(Ticket, parcel), 0, nullptr},
    {"runner", T_OBJECT_EX, offsetof(Ticket, runner), 0, nullptr},
    {"_owner", T_OBJECT_EX, offsetof(Ticket, owner), 0, nullptr},
    {"_state", T_OBJECT, offsetof(Ticket, state), 0, nullptr},
    {"_result", T_OBJECT, offsetof(Ticket, result), 0, nullptr},
    {"_exception", T_OBJECT, offsetof(Ticket, exception), 0, nullptr},
    {"_claimed", T_OBJECT, offsetof(Ticket, claimed), 0, nullptr},
    {"place", T_OBJECT, offsetof(Ticket, place), 0, nullptr},
    {"outcome", T_OBJECT, offsetof(Ticket, outcome), 0, nullptr},
    {"wave", T_OBJECT, offsetof(Ticket, wave), 0, nullptr},
    {"deadline", T_OBJECT, offsetof(Ticket, deadline), 0, nullptr},
    {"admission", T_OBJECT, offsetof(Ticket, admission), 0, nullptr},
    {"_condition", T_OBJECT_EX, offsetof(Ticket, condition), 0, nullptr},
    {"_waiters", T_OBJECT_EX, offsetof(Ticket, waiters), 0, nullptr},
    {"_done_callbacks", T_OBJECT_EX, offsetof(Ticket, callbacks), 0, nullptr},
    {"arrival", T_DOUBLE, offsetof(Ticket, arrival), 0, nullptr},
    {"number", T_PYSSIZET, offsetof(Ticket, number), 0, nullptr},
    {"priority", T_INT, offsetof(Ticket, priority), 0, nullptr},
    {"_is_open", T_BOOL, offsetof(Ticket, is_open), 0, nullptr},
    {"_is_awaited", T_BOOL, offsetof(Ticket, is_awaited), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};
PyMethodDef ticket_methods[] = {
    {"open", ticket_open, METH_NOARGS, nullptr},
    {"_made", ticket_made, METH_VARARGS, nullptr},
    {"_peek", ticket_peek, METH_O, nullptr},
    {"_begin_again", ticket_begin_again, METH_NOARGS, nullptr},
    {"_claim", ticket_claim, METH_O, nullptr},
    {"begin", ticket_begin, METH_NOARGS, nullptr},
    {"settle", ticket_settle, METH_O, nullptr},
    {"announce_plainly", ticket_announce_plainly, METH_O, nullptr},
    {"result", method(ticket_result), METH_FASTCALL | METH_KEYWORDS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot ticket_slots[] = {
    {Py_tp_new, slot(ticket_new)},           {Py_tp_init, slot(ticket_init)},
    {Py_tp_traverse, slot(ticket_traverse)}, {Py_tp_clear, slot(ticket_clear)},
    {Py_tp_dealloc, slot(ticket_dealloc)},   {Py_tp_members, ticket_members},
    {Py_tp_methods, ticket_methods},         {0, nullptr},
};
PyType_Spec ticket_spec = {"orchard.serving._express.Ticket", sizeof(Ticket), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
                           ticket_slots};

// Desk

struct Desk {
  PyObject_HEAD PyObject *lock, *is_inside, *work, *now;
  PyObject *pending, *waiting, *arrivals, *unsettled;
  Py_ssize_t arrived_rows, alarm, last_number, max_pending;
  char closed, forked;
};

Desk *as_desk(PyObject *object) { return reinterpret_cast<Desk *>(object); }

int desk_traverse(PyObject *object, visitproc visit, void *arg) {
  Desk *self = as_desk(object);
  PyObject *fields[] = {self->lock,    self->is_inside, self->work,     self->now,
                        self->pending, self->waiting,   self->arrivals, self->unsettled};
  for (PyObject *field : fields) Py_VISIT(field);
  Py_VISIT(Py_TYPE(object));
  return 0;
}

int desk_clear(PyObject *object) {
  Desk *self = as_desk(object);
  PyObject **fields[] = {&self->lock,    &self->is_inside, &self->work,     &self->now,
                         &self->pending, &self->waiting,   &self->arrivals, &self->unsettled};
  for (PyObject **field : fields) assign(*field, nullptr);
  return 0;
}

void desk_dealloc(PyObject *object) {
  PyObject_GC_UnTrack(object);
  desk_clear(object);
  deallocate(object);
}

// As many as there can be, where there are more.
Py_ssize_t sum(Py_ssize_t one, Py_ssize_t other) {
  Py_ssize_t both;
  return __builtin_add_overflow(one, other, &both) ? PY_SSIZE_T_MAX : both;
}

// What a request is counted as while it is in the line.
Py_ssize_t counted(Py_ssize_t rows) { return rows > 0 ? rows : 1; }

// How many requests are accepted already; -1 with an error.
Py_ssize_t pending_count(Desk *self) {
  Ref pending(new_ref(self->pending));
  Ref count(pending ? PyObject_GetAttr(pending.get(), known.count) : PyLong_FromLong(0));
  return count ? PyLong_AsSsize_t(count.get()) : -1;
}

bool is_set_up(Desk *self) {
  if (self->lock && self->is_inside && self->work && self->now && self->pending && self->waiting &&
      self->arrivals && self->unsettled) {
    return true;
  }
  PyErr_SetString(PyExc_RuntimeError, "the desk is not set up");
  return false;
}

// Whether the ticket may be taken without a look at anything but the line that it is in.
bool is_plain(Ticket *ticket) {
  return ticket->number == 0 && ticket->place == known.arrived_place &&
         ticket->state == known.pending && is_none(ticket->claimed) && is_none(ticket->deadline) &&
         is_none(ticket->admission) && ticket->parcel != nullptr &&
         Py_IS_TYPE(ticket->parcel, parcel_type);
}

// 1 where a plain ticket is of that kind, -1 with an error.
int is_of(Ticket *ticket, PyObject *group, int priority) {
  Ref its_own(new_ref(as_parcel(ticket->parcel)->group)), wanted(new_ref(group));
  if (ticket->priority != priority || !its_own || !wanted) return 0;
  return its_own.get() == group ? 1 : PyObject_RichCompareBool(its_own.get(), group, Py_EQ);
}

// Of more than a few batches most would be looked at again and again. -1 with an error.
int arrivals_are_few(Desk *self, Py_ssize_t limit) {
  Py_ssize_t arrived = PyObject_Size(self->arrivals);
  return arrived < 0 ? -1 : arrived / 4 <= limit;
}

PyObject *desk_arrivals_are(PyObject *object, PyObject *args) {
  Desk *self = as_desk(object);
  PyObject *group;
  int priority;
  Py_ssize_t limit;
  if (!PyArg_ParseTuple(args, "Oin", &group, &priority, &limit) || !is_set_up(self)) return nullptr;
  int are_few = arrivals_are_few(self, limit);
  if (are_few < 0) return nullptr;
  if (are_few == 0) Py_RETURN_FALSE;
  Ref line(PyObject_GetIter(self->arrivals));
  if (!line) return nullptr;
  for (Ref next(PyIter_Next(line.get())); next; next.take(PyIter_Next(line.get()))) {
    if (!is_ticket(next.get())) return nullptr;
    Ticket *ticket = as_ticket(next.get());
    int is_alike = is_plain(ticket) ? is_of(ticket, group, priority) : 0;
    if (is_alike < 0) return nullptr;
    if (is_alike == 0) Py_RETURN_FALSE;
  }
  if (PyErr_Occurred()) return nullptr;
  Py_RETURN_TRUE;
}

// The requests at the head of the line that fill a batch, as a new tuple; or the moment when those
// that there are may run, or None.
PyObject *hurried_batch(Desk *self, Py_ssize_t limit, double now, double max_delay) {
  Py_ssize_t waiting = PyObject_Size(self->waiting), pending = pending_count(self);
  int are_few = arrivals_are_few(self, limit);
  if (waiting < 0 || pending < 0 || are_few < 0) return nullptr;
  if (waiting != 0 || pending != 0 || are_few == 0) Py_RETURN_NONE;
  Ref batch(PyList_New(0)), line(PyObject_GetIter(self->arrivals));
  if (!batch || !line) return nullptr;
  Py_ssize_t rows = 0;
  Ref first;
  bool is_full = false;
  for (Ref next(PyIter_Next(line.get())); next; next.take(PyIter_Next(line.get()))) {
    if (!is_ticket(next.get())) return nullptr;
    Ticket *ticket = as_ticket(next.get());
    if (!is_plain(ticket)) Py_RETURN_NONE;
    if (!first) first.take(new_ref(next.get()));
    Ticket *head = as_ticket(first.get());
    if (!is_plain(head)) Py_RETURN_NONE;
    rows = sum(rows, as_parcel(ticket->parcel)->rows);
    int is_alike = is_of(ticket, as_parcel(head->parcel)->group, head->priority);
    if (is_alike < 0) return nullptr;
    if (is_alike == 0) Py_RETURN_NONE;
    is_full = is_full || (ticket != head && rows > limit);
    if (!is_full && PyList_Append(batch.get(), next.get()) < 0) return nullptr;
  }
  if (PyErr_Occurred()) return nullptr;
  if (!first) Py_RETURN_NONE;
  double due = as_ticket(first.get())->arrival + max_delay;
  return rows >= limit || due <= now ? PyList_AsTuple(batch.get()) : PyFloat_FromDouble(due);
}

PyObject *desk_take_hurried(PyObject *object, PyObject *args) {
  Desk *self = as_desk(object);
  Py_ssize_t limit;
  double now, max_delay;
  if (!PyArg_ParseTuple(args, "ndd", &limit, &now, &max_delay) || !is_set_up(self)) return nullptr;
  Ref batch(hurried_batch(self, limit, now, max_delay));
  if (!batch || !PyTuple_Check(batch.get())) return batch.release();
  Py_ssize_t count = PyTuple_Size(batch.get());
  Ref parcels(PyList_New(count)), waited(PyList_New(count)), numbers(PyList_New(count));
  if (!parcels || !waited || !numbers) return nullptr;
  Ref taken(PyTuple_Pack(3, batch.get(), parcels.get(), waited.get()));
  if (!taken) return nullptr;
  // Until here the collector may have come, and code of others with it: one may be cancelled.
  for (Py_ssize_t n = 0; n < count; ++n) {
    Ticket *ticket = as_ticket(PyTuple_GetItem(batch.get(), n));
    if (!is_plain(ticket)) Py_RETURN_NONE;
    PyObject *seconds = PyFloat_FromDouble(now - ticket->arrival);
    if (seconds == nullptr || PyList_SetItem(waited.get(), n, seconds) < 0) return nullptr;
    PyObject *number = PyLong_FromSsize_t(self->last_number + 1 + n);
    if (number == nullptr || PyList_SetItem(numbers.get(), n, number) < 0) return nullptr;
    if (PyList_SetItem(parcels.get(), n, new_ref(ticket->parcel)) < 0) return nullptr;
  }
  // From here on nothing of Python's runs; only memory may be short.
  for (Py_ssize_t n = 0; n < count; ++n) {
    PyObject *request = PyTuple_GetItem(batch.get(), n);
    Ticket *ticket = as_ticket(request);
    if (PyObject_SetItem(self->unsettled, PyList_GetItem(numbers.get(), n), request) < 0) {
      return nullptr;
    }
    ticket->number = ++self->last_number;
    assign(ticket->claimed, new_ref(known.running));
    assign(ticket->state, new_ref(known.running));
    assign(ticket->place, new_ref(known.running_place));
    Ref left(PyObject_CallMethodObjArgs(self->arrivals, known.popleft, nullptr));
    if (!left) return nullptr;
    Py_ssize_t rows = ticket->parcel == nullptr ? 1 : counted(as_parcel(ticket->parcel)->rows);
    self->arrived_rows = self->arrived_rows > rows ? self->arrived_rows - rows : 0;
  }
  Py_ssize_t arrived = PyObject_Size(self->arrivals);
  if (arrived < 0) return nullptr;
  if (arrived == 0) self->arrived_rows = 0;
  return taken.release();
}

PyMemberDef desk_members[] = {
    {"_lock", T_OBJECT_EX, offsetof(Desk, lock), 0, nullptr},
    {"_is_inside", T_OBJECT_EX, offsetof(Desk, is_inside), 0, nullptr},
    {"_work", T_OBJECT_EX, offsetof(Desk, work), 0, nullptr},
    {"_now", T_OBJECT_EX, offsetof(Desk, now), 0, nullptr},
    {"_pending", T_OBJECT_EX, offsetof(Desk, pending), 0, nullptr},
    {"_waiting", T_OBJECT_EX, offsetof(Desk, waiting), 0, nullptr},
    {"_arrivals", T_OBJECT_EX, offsetof(Desk, arrivals), 0, nullptr},
    {"_unsettled", T_OBJECT_EX, offsetof(Desk, unsettled), 0, nullptr},
    {"_arrived_rows", T_PYSSIZET, offsetof(Desk, arrived_rows), 0, nullptr},
    {"_alarm", T_PYSSIZET, offsetof(Desk, alarm), 0, nullptr},
    {"_last_number", T_PYSSIZET, offsetof(Desk, last_number), 0, nullptr},
    {"_max_pending", T_PYSSIZET, offsetof(Desk, max_pending), 0, nullptr},
    {"_closed", T_BOOL, offsetof(Desk, closed), 0, nullptr},
    {"_forked", T_BOOL, offsetof(Desk, forked), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};
PyMethodDef desk_methods[] = {
    {"take_hurried", desk_take_hurried, METH_VARARGS, nullptr},
    {"arrivals_are", desk_arrivals_are, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot desk_slots[] = {
    {Py_tp_traverse, slot(desk_traverse)}, {Py_tp_clear, slot(desk_clear)},
    {Py_tp_dealloc, slot(desk_dealloc)},   {Py_tp_members, desk_members},
    {Py_tp_methods, desk_methods},         {0, nullptr},
};
PyType_Spec desk_spec = {"orchard.serving._express.Desk", sizeof(Desk), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, desk_slots};

// Entrance

struct Entrance {
  PyObject_HEAD PyObject *desk, *runner, *request_type, *learn;
  PyObject *pattern;  // of the tensors that come: a tuple, which is replaced and never changed
  int misses;
};

// What a pattern has: what such a tensor is known by, and how a request of it is made.
enum Part : Py_ssize_t {
  TYPE,
  LAYOUT,
  DTYPE,
  SHAPE,
  DEVICE,
  SPEC,
  ROWS,
  GROUP,
  WHERE,
  THERE,
  OUTSIDE
};

constexpr int patience = 16;  // tensors of other kinds in a row, before that of the last is learnt

Entrance *as_entrance(PyObject *object) { return reinterpret_cast<Entrance *>(object); }

int entrance_init(PyObject *object, PyObject *args, PyObject *) {
  Entrance *self = as_entrance(object);
  PyObject *desk, *runner, *request_type, *learn;
  if (!PyArg_ParseTuple(args, "O!OO!O", desk_type, &desk, &runner, &PyType_Type, &request_type,
                        &learn)) {
    return -1;
  }
  if (!PyType_IsSubtype(reinterpret_cast<PyTypeObject *>(request_type), ticket_type)) {
    PyErr_SetString(PyExc_TypeError, "the requests' class must be a Ticket");
    return -1;
  }
  if (self->desk != nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "the entrance is set up already");
    return -1;
  }
  self->desk = new_ref(desk);
  self->runner = new_ref(runner);
  self->request_type = new_ref(request_type);
  self->learn = new_ref(learn);
  self->misses = patience;
  return 0;
}

int entrance_traverse(PyObject *object, visitproc visit, void *arg) {
  Entrance *self = as_entrance(object);
  Py_VISIT(self->desk);
  Py_VISIT(self->runner);
  Py_VISIT(self->request_type);
  Py_VISIT(self->learn);
  Py_VISIT(self->pattern);
  Py_VISIT(Py_TYPE(object));
  return 0;
}

int entrance_clear(PyObject *object) {
  Entrance *self = as_entrance(object);
  PyObject **fields[] = {&self->desk, &self->runner, &self->request_type, &self->learn,
                         &self->pattern};
  for (PyObject **field : fields) assign(*field, nullptr);
  return 0;
}

void entrance_dealloc(PyObject *object) {
  PyObject_GC_UnTrack(object);
  entrance_clear(object);
  deallocate(object);
}

// 1 where x is of that pattern; -1 with an error.
int is_known(PyObject *pattern, PyObject *x) {
  if (reinterpret_cast<PyObject *>(Py_TYPE(x)) != PyTuple_GetItem(pattern, TYPE)) return 0;
  Ref layout(PyObject_GetAttr(x, known.layout));
  if (!layout) return -1;
  if (layout.get() != PyTuple_GetItem(pattern, LAYOUT)) return 0;
  Ref dtype(PyObject_GetAttr(x, known.dtype));
  if (!dtype) return -1;
  if (dtype.get() != PyTuple_GetItem(pattern, DTYPE)) return 0;
  Ref shape(PyObject_GetAttr(x, known.shape));
  if (!shape) return -1;
  int is_same = PyObject_RichCompareBool(shape.get(), PyTuple_GetItem(pattern, SHAPE), Py_EQ);
  if (is_same != 1) return is_same;
  Ref device(PyObject_GetAttr(x, known.device));
  if (!device) return -1;
  return PyObject_RichCompareBool(device.get(), PyTuple_GetItem(pattern, DEVICE), Py_EQ);
}

// The pattern of which x is an example, or None.
PyObject *learn_from(Entrance *self, PyObject *x) {
  Ref found(PyObject_CallFunctionObjArgs(self->learn, x, nullptr));
  if (!found || found.get() == Py_None) return found.release();
  PyObject *spec, *rows, *group, *where, *is_there, *outside;
  if (!PyArg_ParseTuple(found.get(), "OO!OOO!O", &spec, &PyLong_Type, &rows, &group, &where,
                        &PyBool_Type, &is_there, &outside)) {
    return nullptr;
  }
  Ref layout(PyObject_GetAttr(x, known.layout)), dtype(PyObject_GetAttr(x, known.dtype)),
      shape(PyObject_GetAttr(x, known.shape)), device(PyObject_GetAttr(x, known.device));
  if (!layout || !dtype || !shape || !device) return nullptr;
  return PyTuple_Pack(11, Py_TYPE(x), layout.get(), dtype.get(), shape.get(), device.get(), spec,
                      rows, group, where, is_there, outside);
}

// The pattern that x is of, or None; it is learnt where others came too often.
PyObject *pattern_of(Entrance *self, PyObject *x) {
  Ref pattern(new_ref(self->pattern == nullptr ? Py_None : self->pattern));
  int is_of_it = pattern.get() == Py_None ? 0 : is_known(pattern.get(), x);
  if (is_of_it < 0) return nullptr;
  if (is_of_it == 0 && self->misses < patience) {
    ++self->misses;
    Py_RETURN_NONE;
  }
  self->misses = 0;
  if (is_of_it == 1) return pattern.release();
  pattern.take(learn_from(self, x));
  if (!pattern || pattern.get() == Py_None) return pattern.release();
  assign(self->pattern, new_ref(pattern.get()));
  return pattern.release();
}

// A parcel for x, which is of that pattern.
PyObject *wrap(PyObject *pattern, PyObject *x) {
  PyObject *tell = PyTuple_GetItem(pattern, OUTSIDE);
  Ref outside(tell == Py_None ? new_ref(tell) : PyObject_CallNoArgs(tell));
  if (!outside) return nullptr;
  Ref leaves(PyTuple_Pack(1, x)), object(allocate(parcel_type));
  if (!leaves || !object) return nullptr;
  Parcel *parcel = as_parcel(object.get());
  parcel->rows = PyLong_AsSsize_t(PyTuple_GetItem(pattern, ROWS));
  if (parcel->rows == -1 && PyErr_Occurred()) return nullptr;
  parcel->leaves = leaves.release();
  parcel->spec = new_ref(PyTuple_GetItem(pattern, SPEC));
  parcel->group = new_ref(PyTuple_GetItem(pattern, GROUP));
  parcel->device = new_ref(PyTuple_GetItem(pattern, WHERE));
  parcel->outside = outside.release();
  parcel->is_there = PyTuple_GetItem(pattern, THERE) == Py_True;
  return object.release();
}

// 1 where there is space for another request, under the lock; -1 with an error.
int has_space(Desk *desk) {
  if (desk->closed || desk->forked) return 0;
  Py_ssize_t waiting = PyObject_Size(desk->waiting), arrived = PyObject_Size(desk->arrivals);
  Py_ssize_t pending = pending_count(desk);
  if (waiting < 0 || arrived < 0 || pending < 0) return -1;
  return waiting == 0 && pending + arrived < desk->max_pending;
}

// Leave the request at the desk, under the lock: 1 where it was accepted, -1 with an error.
int leave(Desk *desk, PyObject *request, Py_ssize_t rows) {
  int fits = has_space(desk);
  if (fits != 1) return fits;
  Ref clock(new_ref(desk->now == nullptr ? Py_None : desk->now));
  Ref now(PyObject_CallNoArgs(clock.get()));
  double arrival = now ? PyFloat_AsDouble(now.get()) : -1.0;
  if (arrival == -1.0 && PyErr_Occurred()) return -1;
  as_ticket(request)->arrival = arrival;
  Ref appended(PyObject_CallMethodObjArgs(desk->arrivals, known.append, request, nullptr));
  if (!appended) return -1;
  desk->arrived_rows = sum(desk->arrived_rows, counted(rows));
  if (desk->arrived_rows >= desk->alarm) {
    Ref notified(PyObject_CallMethodObjArgs(desk->work, known.notify, nullptr));
    if (!notified) return -1;
    desk->alarm = PY_SSIZE_T_MAX;
  }
  return 1;
}

PyObject *entrance_submit(PyObject *object, PyObject *args) {
  Entrance *self = as_entrance(object);
  PyObject *x, *mine;
  if (!PyArg_ParseTuple(args, "OO!", &x, &PyList_Type, &mine)) return nullptr;
  Ref held(new_ref(self->desk));
  Desk *desk = as_desk(held.get());
  if (desk == nullptr) PyErr_SetString(PyExc_RuntimeError, "the entrance is not set up");
  if (desk == nullptr || !is_set_up(desk)) return nullptr;
  if (desk->closed || desk->forked) Py_RETURN_FALSE;
  Ref pattern(pattern_of(self, x));
  if (!pattern && PyErr_ExceptionMatches(PyExc_Exception)) {
    PyErr_Clear();  // what is wrong with x is said on the usual way
    Py_RETURN_FALSE;
  }
  if (!pattern) return nullptr;
  if (pattern.get() == Py_None) Py_RETURN_FALSE;
  Ref is_inside(new_ref(desk->is_inside == nullptr ? Py_None : desk->is_inside));
  Ref inside(PyObject_CallNoArgs(is_inside.get()));
  if (!inside) return nullptr;
  if (inside.get() != Py_False) Py_RETURN_FALSE;
  Ref parcel(wrap(pattern.get(), x));
  if (!parcel) return nullptr;
  Py_ssize_t rows = as_parcel(parcel.get())->rows;
  Ref request(ticket_new(reinterpret_cast<PyTypeObject *>(self->request_type), nullptr, nullptr));
  if (!request) return nullptr;
  Ticket *ticket = as_ticket(request.get());
  ticket->parcel = parcel.release();
  ticket->runner = new_ref(self->runner);
  ticket->owner = new_ref(held.get());
  Ref lock(new_ref(desk->lock));  // a fork makes another
  Ref locked(PyObject_CallMethodObjArgs(lock.get(), known.acquire, nullptr));
  if (!locked) return nullptr;
  int is_left = PyList_Append(mine, request.get()) < 0 ? -1 : leave(desk, request.get(), rows);
  PyObject *kind, *error, *trace;
  PyErr_Fetch(&kind, &error, &trace);
  Ref unlocked(PyObject_CallMethodObjArgs(lock.get(), known.release, nullptr));
  PyErr_Restore(kind, error, trace);
  return is_left < 0 ? nullptr : PyBool_FromLong(is_left);
}

PyMethodDef entrance_methods[] = {
    {"submit", entrance_submit, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot entrance_slots[] = {
    {Py_tp_init, slot(entrance_init)},   {Py_tp_traverse, slot(entrance_traverse)},
    {Py_tp_clear, slot(entrance_clear)}, {Py_tp_dealloc, slot(entrance_dealloc)},
    {Py_tp_methods, entrance_methods},   {0, nullptr},
};
PyType_Spec entrance_spec = {"orchard.serving._express.Entrance", sizeof(Entrance), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, entrance_slots};

// All of a batch at once

PyObject *settle_each(PyObject *, PyObject *args) {
  PyObject *batch, *outcomes, *settled;
  if (!PyArg_ParseTuple(args, "O!O!O!", &PyTuple_Type, &batch, &PyList_Type, &outcomes,
                        &PyList_Type, &settled)) {
    return nullptr;
  }
  Py_ssize_t count = PyTuple_Size(batch), completed = 0;
  if (PyList_Size(outcomes) != count) {
    PyErr_SetString(PyExc_ValueError, "as many outcomes as requests are needed");
    return nullptr;
  }
  for (Py_ssize_t n = 0; n < count; ++n) {
    PyObject *request = PyTuple_GetItem(batch, n);
    if (!is_ticket(request)) return nullptr;
    if (as_ticket(request)->place != known.running_place) continue;
    Ref outcome(new_ref(PyList_GetItem(outcomes, n)));
    if (!outcome) return nullptr;
    PyObject *error = PyTuple_GetItem(outcome.get(), 1);
    if (error == nullptr) return nullptr;
    completed += error == Py_None;
    settle(as_ticket(request), outcome.get());
    if (PyList_Append(settled, request) < 0) return nullptr;
  }
  return PyLong_FromSsize_t(completed);
}

PyObject *announce_each(PyObject *, PyObject *args) {
  PyObject *settled, *wave;
  if (!PyArg_ParseTuple(args, "O!O", &PyList_Type, &settled, &wave)) return nullptr;
  if (wave != Py_None && !is_sleepers(wave)) return nullptr;
  Ref others(PyList_New(0));
  if (!others) return nullptr;
  for (Py_ssize_t n = 0; n < PyList_Size(settled); ++n) {
    Ref request(new_ref(PyList_GetItem(settled, n)));
    if (!request || !is_ticket(request.get())) return nullptr;
    Ticket *ticket = as_ticket(request.get());
    if (!announce_plainly(ticket, wave == Py_None ? nullptr : as_sleepers(wave)) &&
        PyList_Append(others.get(), request.get()) < 0) {
      return nullptr;
    }
  }
  return others.release();
}

PyObject *forget_each(PyObject *, PyObject *args) {
  PyObject *settled, *unsettled;
  if (!PyArg_ParseTuple(args, "O!O", &PyList_Type, &settled, &unsettled)) return nullptr;
  for (Py_ssize_t n = 0; n < PyList_Size(settled); ++n) {
    Ref request(new_ref(PyList_GetItem(settled, n)));
    if (!request || !is_ticket(request.get())) return nullptr;
    Ref number(PyLong_FromSsize_t(as_ticket(request.get())->number));
    if (!number) return nullptr;
    if (PyObject_DelItem(unsettled, number.get()) < 0) {
      if (!PyErr_ExceptionMatches(PyExc_KeyError)) return nullptr;
      PyErr_Clear();
    }
  }
  Py_RETURN_NONE;
}

// The module

bool intern(PyObject *&name, const char *text) {
  if (name == nullptr) name = PyUnicode_InternFromString(text);
  return name != nullptr;
}

bool learn_names() {
  return intern(known.acquire, "acquire") && intern(known.append, "append") &&
         intern(known.count, "count") && intern(known.device, "device") &&
         intern(known.dtype, "dtype") && intern(known.layout, "layout") &&
         intern(known.notify, "notify") && intern(known.popleft, "popleft") &&
         intern(known.release, "release") && intern(known.shape, "shape") &&
         intern(known.slow_result, "_slow_result");
}

// Anew each time: where orchard was imported again, these are others.
bool learn_value(PyObject *&value, PyObject *from, const char *name) {
  PyObject *found = PyObject_GetAttrString(from, name);
  if (found != nullptr) assign(value, found);
  return found != nullptr;
}

bool learn_values() {
  Ref futures(PyImport_ImportModule("concurrent.futures._base"));
  Ref tickets(PyImport_ImportModule("orchard.serving.tickets"));
  if (!futures || !tickets) return false;
  Ref places(PyObject_GetAttrString(tickets.get(), "Place"));
  return places && learn_value(known.pending, futures.get(), "PENDING") &&
         learn_value(known.running, futures.get(), "RUNNING") &&
         learn_value(known.finished, futures.get(), "FINISHED") &&
         learn_value(known.arrived_place, places.get(), "ARRIVED") &&
         learn_value(known.running_place, places.get(), "RUNNING") &&
         learn_value(known.settled_place, places.get(), "SETTLED");
}

bool add_type(PyObject *module, PyTypeObject *&type, PyType_Spec *spec, const char *name) {
  if (type == nullptr) type = reinterpret_cast<PyTypeObject *>(PyType_FromSpec(spec));
  return type != nullptr &&
         PyModule_AddObjectRef(module, name, reinterpret_cast<PyObject *>(type)) == 0;
}

int execute(PyObject *module) {
  bool is_done = learn_names() && learn_values() &&
                 add_type(module, parcel_type, &parcel_spec, "Parcel") &&
                 add_type(module, sleepers_type, &sleepers_spec, "Sleepers") &&
                 add_type(module, ticket_type, &ticket_spec, "Ticket") &&
                 add_type(module, desk_type, &desk_spec, "Desk") &&
                 add_type(module, entrance_type, &entrance_spec, "Entrance");
  return is_done ? 0 : -1;
}

PyMethodDef functions[] = {
    {"settle_each", settle_each, METH_VARARGS, nullptr},
    {"announce_each", announce_each, METH_VARARGS, nullptr},
    {"forget_each", forget_each, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef_Slot module_slots[] = {{Py_mod_exec, slot(execute)}, {0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                          "orchard.serving._express",
                          nullptr,
                          0,
                          functions,
                          module_slots,
                          nullptr,
                          nullptr,
                          nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__express() { return PyModuleDef_Init(&definition); }
