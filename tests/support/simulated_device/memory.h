// Memory of the simulated device, and who has read and written it; see device.cpp.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <set>

namespace {
constexpr auto DEVICE = c10::DeviceType::PrivateUse1;
const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);
constexpr int MOST = 16;  // devices
constexpr int GARBAGE = 0x7f;
constexpr size_t MOST_FILLED = size_t(16) << 20;  // of a block: DeepSpeed's empty buckets have 2 GB

thread_local c10::DeviceIndex current = 0;
thread_local c10::StreamId stream_now[MOST] = {0};
thread_local int quiet = 0;  // inside of what the device itself does
c10::DeviceIndex devices = 8;
int64_t capacity = int64_t(16) << 30;
c10::DeviceIndex there(c10::DeviceIndex d) {
  TORCH_CHECK(d < devices, "simulated device: invalid device ordinal ", int(d));
  return d;
}
std::atomic<int> stuck{0};  // 1: a collective never ends, and so no wait for the device; 2: it was aborted
std::atomic<int64_t> used{0}, peak{0}, operations{0}, streams{1};
PyObject* locator = nullptr;
PyObject* listener = nullptr;  // called with what happens and what it is about; never under `lock`, as it takes the GIL

struct OnDevice {  // makes a device the current one
  c10::DeviceIndex before = current;
  explicit OnDevice(c10::DeviceIndex d) { current = d < 0 ? current : d; }
  ~OnDevice() { current = before; }
};
void tell(const char* what, const std::string& about) {
  if (!listener || quiet) return;
  pybind11::gil_scoped_acquire gil;
  PyObject *type, *value, *trace;  // an error that is on its way stays what it is
  PyErr_Fetch(&type, &value, &trace);
  PyObject* result = PyObject_CallFunction(listener, "ss", what, about.c_str());
  if (!result) throw pybind11::error_already_set();
  Py_DECREF(result);
  PyErr_Restore(type, value, trace);
}

std::string place() {  // where the program is
  if (!locator) return "";
  pybind11::gil_scoped_acquire gil;
  return pybind11::cast<std::string>(pybind11::handle(locator)());
}

// ---- who has waited for whom

using Clock = std::vector<int64_t>;  // by agent: the latest of its operations that are known to be done
constexpr int HOST = 0;
constexpr int TIME = 1;  // no agent: the nanosecond at which all that is over; see clock.py. Without a clock it stays 0
struct Access {
  uintptr_t begin, end;
  int agent;
  int64_t time;
  bool write;
  std::string op;
};
struct Freed {  // memory of a stream that another one still used when it was freed
  int home, agent;
  int64_t time;
  std::string op;
};
struct Block {
  size_t size;
  int home;  // the stream that it was allocated on
  c10::DeviceIndex device;
  std::vector<Access> accesses;
  std::set<int> recorded;
};
struct HostCopy {  // a copy between host and device that the host has not waited for
  int agent;
  int64_t time;
  at::Tensor host, held;  // held: what arrives, or what was sent
  bool arrives;
  std::string place;  // in the program
};
std::recursive_mutex lock;
std::vector<Clock> clocks(2, Clock(2, 0));
std::map<std::pair<int, c10::StreamId>, int> agents;
std::map<uintptr_t, Block> blocks;
std::map<uintptr_t, size_t> pinned;
std::vector<HostCopy> host_copies;
std::vector<Freed> freed;
std::vector<std::string> reports;  // all that were found
std::string unraised;

int64_t known(const Clock& clock, int agent) { return size_t(agent) < clock.size() ? clock[agent] : 0; }
void join(Clock& to, const Clock& from) {
  if (to.size() < from.size()) to.resize(from.size(), 0);
  for (size_t i = 0; i < from.size(); i++) to[i] = std::max(to[i], from[i]);
}
int agent_of(c10::DeviceIndex device, c10::StreamId stream) {
  auto [found, is_new] = agents.try_emplace({device, stream}, int(clocks.size()));
  if (is_new) clocks.emplace_back(clocks.size() + 1, 0);
  return found->second;
}
int agent_now() { return agent_of(current, stream_now[current]); }
thread_local bool host_waited = false;  // in the latest operation
[[noreturn]] void report(const std::string& what) {
  reports.push_back(what);
  TORCH_CHECK(false, "simulated device: ", what);
}
void report_later(const std::string& what) {  // where nothing may be raised: the next operation raises it
  reports.push_back(what);
  unraised = what;
}
int64_t next(int agent) {  // the time of an operation that the host enqueues now
  join(clocks[agent], clocks[HOST]);
  host_waited = false;
  // it may be given memory that was freed on its stream: whoever used that must be done
  for (auto& f : freed)
    if (f.home == agent && known(clocks[agent], f.agent) < f.time) {
      std::string op = f.op;
      freed.clear();
      report("a tensor was freed that " + op + " on another stream still uses: record_stream is missing");
    }
  std::erase_if(freed, [&](const Freed& f) { return f.home == agent; });
  return ++clocks[agent][agent];
}
Block* block_of(uintptr_t at) {
  auto after = blocks.upper_bound(at);
  if (after == blocks.begin()) return nullptr;
  auto& [base, block] = *std::prev(after);
  return at < base + block.size ? &block : nullptr;
}
std::pair<uintptr_t, uintptr_t> extent(const at::Tensor& t) {
  auto begin = reinterpret_cast<uintptr_t>(t.data_ptr());
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim(); d++) last += (t.size(d) - 1) * t.stride(d);
  return {begin, begin + (last + 1) * t.element_size()};
}
void touch(const std::string& op, const at::Tensor& t, int who, int64_t time, bool write) {
  if (!t.defined() || t.numel() == 0 || quiet) return;
  auto [begin, end] = extent(t);
  Block* block = block_of(begin);
  if (!block) return;
  auto& all = block->accesses;
  for (auto& a : all) {
    if (a.agent == who || !(a.begin < end && begin < a.end) || !(write || a.write) || known(clocks[who], a.agent) >= a.time) continue;
    report(op + (write ? " writes" : " reads") + " a tensor that " + a.op + ", on another stream, still " + (a.write ? "writes" : "reads") +
           ": nothing has waited for it");
  }
  std::erase_if(all, [&](const Access& a) { return begin <= a.begin && a.end <= end && (write || (a.agent == who && !a.write)); });
  all.push_back({begin, end, who, time, write, op});
}
void require_unchanged(const HostCopy& copy) {
  if (memcmp(copy.host.contiguous().data_ptr(), copy.held.data_ptr(), copy.held.nbytes()))
    report_later("a host buffer was changed before its copy to the device had been waited for: " + copy.place);
}
// What the host has waited for is there. The copies that are over are returned: to let go of a tensor can need the GIL,
// so that is done without `lock`.
std::vector<HostCopy> settle() {
  std::vector<HostCopy> over, open;
  for (HostCopy& copy : host_copies) {
    if (known(clocks[HOST], copy.agent) < copy.time) {
      open.push_back(std::move(copy));
      continue;
    }
    if (copy.arrives) copy.host.copy_(copy.held);
    else require_unchanged(copy);
    over.push_back(std::move(copy));
  }
  host_copies = std::move(open);
  return over;
}
void stay_while_stuck() {
  std::optional<pybind11::gil_scoped_release> released;
  if (stuck && PyGILState_Check()) released.emplace();
  while (stuck == 1) usleep(10000);
  TORCH_CHECK(stuck != 2, "simulated device: the communicator was aborted");
}
void host_waits(const Clock& clock, const char* what) {
  if (quiet) return;
  tell("wait", what);
  host_waited = true;
  stay_while_stuck();
  std::vector<HostCopy> over;
  std::lock_guard<std::recursive_mutex> guard(lock);
  join(clocks[HOST], clock);
  over = settle();
}
bool is_done(const Clock& clock) {  // as far as the host knows
  for (size_t agent = 1; agent < clock.size(); agent++)
    if (known(clocks[HOST], agent) < clock[agent]) return false;
  return true;
}
Clock clock_of(int agent) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  return clocks[agent];
}
void raise_unraised() {
  if (unraised.empty()) return;
  std::string what;
  std::swap(what, unraised);
  TORCH_CHECK(false, "simulated device: ", what);
}

// ---- memory

void* take(size_t n) {
  if (!n) return nullptr;
  TORCH_CHECK_WITH(OutOfMemoryError, used + int64_t(n) <= capacity, "simulated device: out of memory: ", used.load(),
                   " bytes of ", capacity, " in use, ", n, " asked for");
  void* p = nullptr;
  TORCH_CHECK(!posix_memalign(&p, 512, n), "no host memory");
  memset(p, GARBAGE, std::min(n, MOST_FILLED));  // nothing starts as zeros by chance, and what was freed is not there
  std::lock_guard<std::recursive_mutex> guard(lock);
  blocks[reinterpret_cast<uintptr_t>(p)] = {n, agent_now(), current, {}, {}};
  used += n;
  if (used > peak) peak = used.load();
  return p;
}
void give(void* p) {
  if (!p) return;
  {
    std::lock_guard<std::recursive_mutex> guard(lock);
    auto found = blocks.find(reinterpret_cast<uintptr_t>(p));
    Block& block = found->second;
    for (auto& a : block.accesses) {
      // it is given out again once the streams that were recorded have come this far, and what they have waited for
      bool is_awaited = std::any_of(block.recorded.begin(), block.recorded.end(), [&](int r) { return r == a.agent || known(clocks[r], a.agent) >= a.time; });
      if (a.agent != block.home && known(clocks[block.home], a.agent) < a.time && known(clocks[HOST], a.agent) < a.time && !is_awaited)
        freed.push_back({block.home, a.agent, a.time, a.op});
    }
    memset(p, GARBAGE, std::min(block.size, MOST_FILLED));
    used -= block.size;
    blocks.erase(found);
  }
  free(p);
}
struct Memory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    void* p = take(n);
    return {p, p, &give, c10::Device(DEVICE, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (Block* block = block_of(reinterpret_cast<uintptr_t>(data.get()))) block->recorded.insert(agent_of(stream.device_index(), stream.id()));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* stat : {&stats.allocated_bytes[0], &stats.reserved_bytes[0], &stats.active_bytes[0]}) {
      stat->current = used;
      stat->peak = peak;
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { peak = used.load(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override { return {size_t(capacity - used), size_t(capacity)}; }
} memory;
REGISTER_ALLOCATOR(DEVICE, &memory)

bool is_pinned(const void* p) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  auto after = pinned.upper_bound(reinterpret_cast<uintptr_t>(p));
  return after != pinned.begin() && reinterpret_cast<uintptr_t>(p) < std::prev(after)->first + std::prev(after)->second;
}
void unpin(void* p) {
  if (!p) return;
  {
    std::lock_guard<std::recursive_mutex> guard(lock);
    pinned.erase(reinterpret_cast<uintptr_t>(p));
  }
  free(p);
}
struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    void* p = nullptr;
    if (n) {
      TORCH_CHECK(!posix_memalign(&p, 64, n), "no host memory");
      std::lock_guard<std::recursive_mutex> guard(lock);
      pinned[reinterpret_cast<uintptr_t>(p)] = n;
    }
    return {p, p, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
} pinned_memory;
}  // namespace
