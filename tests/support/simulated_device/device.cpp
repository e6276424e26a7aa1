// A device that is not there: memory of the host under torch's PrivateUse1 key, computed by torch's CPU kernels.
//
// Every operation is computed at once, so that numbers can be compared with a CPU's. What an accelerator would do later
// is kept as clocks: the host and each stream are agents, an agent's clock says how far it has waited for each other
// one (a vector clock), and each block of memory remembers who has read and written it. An access that no event, wait
// or synchronisation puts after an earlier one is reported: it raises, with the name of the operation.
//
//   - a copy to the host that does not block fills its target with 0x7f until the host has waited for its stream
//   - a host buffer that is copied to the device without blocking may not change before the host has waited
//   - memory that another stream still uses may not be freed, unless record_stream says so
//   - tensors of two devices, or of the host and the device, do not mix: what `x[...]` is given and 0-dim host scalars
//     that are read, not those of a list, may be the host's
//   - random numbers come from generators of the device
//   - whatever makes the host wait for the device is told to Python, which counts it
#include "memory.h"

namespace {
// ---- devices, generators, streams, events

struct Generator final : at::CPUGeneratorImpl {  // a CPU's numbers, of a device
  explicit Generator(c10::DeviceIndex i) : CPUGeneratorImpl(c10::default_rng_seed_val) {
    device_ = c10::Device(DEVICE, i);
    key_set_ = KEYS;
  }
};
std::vector<at::Generator>& generators() {
  static std::vector<at::Generator> all;
  while (all.size() < size_t(devices)) all.push_back(at::make_generator<Generator>(c10::DeviceIndex(all.size())));
  return all;
}
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return devices; }
  void setCurrentDevice(c10::DeviceIndex d) const override { current = d; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override { return std::exchange(current, there(d)); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return std::exchange(current, there(d)); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex i) const override { return generators()[i < 0 ? current : i]; }
  at::Generator getNewGenerator(c10::DeviceIndex i) const override { return at::make_generator<Generator>(i < 0 ? current : i); }
  at::Device getDeviceFromPtr(void*) const override { return {DEVICE, current}; }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t n) const override {
    auto fresh = memory.allocate(n);
    if (n && storage.nbytes()) memcpy(fresh.get(), storage.data(), std::min(n, storage.nbytes()));
    const_cast<c10::Storage&>(storage).set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(n);
  }
} hooks;

struct Event {
  Clock clock;
  int questions = 0;
  std::chrono::steady_clock::time_point when;
};
c10::Stream stream_of(c10::Device d, c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, d, id); }
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = DEVICE;
  c10::DeviceType type() const override { return DEVICE; }
  c10::Device exchangeDevice(c10::Device d) const override { return {DEVICE, std::exchange(current, there(d.index()))}; }
  c10::Device getDevice() const override { return {DEVICE, current}; }
  void setDevice(c10::Device d) const override { current = there(d.index()); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { current = d.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return devices; }
  c10::Stream getStream(c10::Device d) const override { return stream_of(d, stream_now[d.index()]); }
  c10::Stream getDefaultStream(c10::Device d) const override { return stream_of(d, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return stream_of(d, streams++); }
  c10::Stream getNewStream(c10::Device d, int) const override { return stream_of(d.has_index() ? d : getDevice(), streams++); }
  c10::Stream exchangeStream(c10::Stream s) const override { return stream_of(s.device(), std::exchange(stream_now[s.device_index()], s.id())); }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& s, c10::DeviceIndex, c10::EventFlag) const override {
    std::lock_guard<std::recursive_mutex> guard(lock);
    delete static_cast<Event*>(*event);
    *event = new Event{clocks[agent_of(s.device_index(), s.id())], 0, std::chrono::steady_clock::now()};
  }
  void block(void* event, const c10::Stream& s) const override {
    if (!event) return;
    std::lock_guard<std::recursive_mutex> guard(lock);
    join(clocks[agent_of(s.device_index(), s.id())], static_cast<Event*>(event)->clock);
  }
  bool queryEvent(void* event) const override {  // not yet, at first; who hears yes has waited
    std::vector<HostCopy> over;
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (!event) return true;
    auto* asked = static_cast<Event*>(event);
    if (!is_done(asked->clock) && asked->questions++ == 0) return false;
    join(clocks[HOST], asked->clock);
    over = settle();
    return true;
  }
  bool queryStream(const c10::Stream& s) const override {
    std::vector<HostCopy> over;
    std::lock_guard<std::recursive_mutex> guard(lock);
    join(clocks[HOST], clocks[agent_of(s.device_index(), s.id())]);
    over = settle();
    return true;
  }
  void synchronizeStream(const c10::Stream& s) const override { host_waits(clock_of(agent_of(s.device_index(), s.id())), "synchronize stream"); }
  void synchronizeEvent(void* event) const override {
    if (event) host_waits(static_cast<Event*>(event)->clock, "synchronize event");
  }
  void synchronizeDevice(c10::DeviceIndex d) const override {
    tell("finish", "");  // collectives that nobody has waited for
    Clock all;
    for (auto& [key, agent] : agents)
      if (key.first == d) join(all, clock_of(agent));
    host_waits(all, "synchronize device");
  }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(static_cast<Event*>(to)->when - static_cast<Event*>(from)->when).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---- tensors and copies

at::Tensor on_host(const at::Tensor& t) {  // the same memory, seen by the host
  if (!t.defined() || t.is_cpu()) return t;
  at::Tensor view = at::from_blob(t.data_ptr(), t.sizes(), t.strides(), at::TensorOptions().dtype(t.dtype()).device(c10::kCPU));
  view._set_conj(t.is_conj());
  view._set_neg(t.is_neg());
  return view;
}
at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device,
                 std::optional<bool>, std::optional<at::MemoryFormat> format) {
  OnDevice on(device ? device->index() : -1);
  return at::detail::empty_generic(size, &memory, KEYS, c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  OnDevice on(device ? device->index() : -1);
  return at::detail::empty_strided_generic(size, stride, &memory, KEYS, c10::dtype_or_default(dtype));
}
bool overlap(const at::Tensor& a, const at::Tensor& b) {
  auto [x, y] = extent(a);
  auto [u, v] = extent(b);
  return x < v && u < y;
}
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  if (quiet || !self.numel()) {
    on_host(to).copy_(on_host(self));
    return to;
  }
  raise_unraised();
  bool to_host = to.is_cpu(), from_host = self.is_cpu();
  const at::Tensor& host = to_host ? to : self;
  OnDevice on((from_host ? to : self).device().index());
  int who;
  int64_t time;
  std::string at = non_blocking && (to_host || from_host) ? place() : "";
  std::vector<HostCopy> over;
  {
    std::lock_guard<std::recursive_mutex> guard(lock);
    who = agent_now();
    // between two devices the streams of both wait, before and after, as CUDA's do
    int other = to_host || from_host ? who : agent_of(to.device().index(), stream_now[to.device().index()]);
    join(clocks[who], Clock(clocks[other]));
    time = next(who);
    join(clocks[other], Clock(clocks[who]));
    if (!from_host) touch("a copy", self, who, time, false);
    if (!to_host) touch("a copy", to, who, time, true);
    for (HostCopy& copy : host_copies)  // what has come in the same stream before is sent again
      if (from_host && copy.arrives && overlap(copy.host, self) && known(clocks[who], copy.agent) >= copy.time) copy.host.copy_(copy.held);
    std::vector<HostCopy> open;  // what was sent from there before, in this stream, was read before it is written
    for (HostCopy& copy : host_copies)
      if (to_host && !copy.arrives && overlap(copy.host, to) && known(clocks[who], copy.agent) >= copy.time) {
        require_unchanged(copy);
        over.push_back(std::move(copy));
      } else {
        open.push_back(std::move(copy));
      }
    host_copies = std::move(open);
    if (non_blocking && to_host) {
      host_copies.push_back({who, time, to, on_host(self).clone(), true, at});
      if (to.is_contiguous()) memset(to.data_ptr(), GARBAGE, to.nbytes());
      else to.fill_(GARBAGE);
    } else if (non_blocking && from_host) {
      host_copies.push_back({who, time, self, self.contiguous().clone(), false, at});
    }
  }
  if (!(non_blocking && to_host)) on_host(to).copy_(on_host(self));
  if (!to_host && !from_host) return to;
  if (!non_blocking) host_waits(clock_of(who), to_host ? "copy to the host" : "copy to the device");
  else if (!is_pinned(host.storage().data())) tell("wait", to_host ? "copy to pageable memory" : "copy from pageable memory");
  return to;
}
at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  at::native::resize_(to, self.sizes(), std::nullopt);
  return copy_from(self, to, false);
}
at::Scalar item(const at::Tensor& self) {
  raise_unraised();
  OnDevice on(self.device().index());
  Clock clock;
  {
    std::lock_guard<std::recursive_mutex> guard(lock);
    int who = agent_now();
    touch("item()", self, who, next(who), false);
    clock = clocks[who];
  }
  host_waits(clock, "item");
  return on_host(self).item();
}
at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::as_strided_tensorimpl(self, size, stride, self.storage_offset());
}
at::Tensor& set_storage_at(at::Tensor& self, at::Storage s, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, s, offset, size, stride);
}
at::Tensor& set_storage(at::Tensor& self, at::Storage s) {
  int64_t n = s.nbytes() / self.dtype().itemsize();
  return at::native::set_storage_cpu_(self, s, 0, {n}, {1});
}
at::Tensor& set_nothing(at::Tensor& self) {
  return at::native::set_storage_cpu_(self, at::Storage(at::Storage::use_byte_size_t(), 0, &memory, true), 0, {0}, {});
}
at::Tensor histc(const at::Tensor& self, int64_t bins, const at::Scalar& low, const at::Scalar& high) {  // of whole numbers too, as CUDA's
  if (self.is_floating_point()) {
    OnDevice on(self.device().index());
    {
      std::lock_guard<std::recursive_mutex> guard(lock);
      int who = agent_now();
      touch("aten::histc", self, who, next(who), false);
    }
    quiet++;
    auto counted = on_host(self).histc(bins, low, high).to(self.device());
    quiet--;
    return counted;
  }
  return self.to(at::kFloat).histc(bins, low, high).to(self.scalar_type());
}
bool may_take_data(const at::Tensor& self, const at::Tensor& from) {  // a parameter stays itself where it moves, as with CUDA
  auto is_dense = [](const at::Tensor& t) { return t.layout() == at::kStrided && (t.is_cpu() || t.device().type() == DEVICE); };
  return is_dense(self) && is_dense(from);
}
void record_stream(at::Tensor& self, c10::Stream stream) { memory.recordStream(self.storage().data_ptr(), stream); }
int64_t attention_kernel(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool, std::optional<double>, bool) {
  return int64_t(sdp::SDPBackend::math);
}

// ---- operations

// as CUDA allows: what is copied may lie on the host, and so may an index of `x[index]`
const std::set<std::string> INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"};
// their result, or its size, is known on the host
const std::set<std::string> WAITING = {"aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique", "aten::_unique2", "aten::unique_dim",
                                       "aten::unique_consecutive", "aten::bincount", "aten::unique_dim_consecutive"};

// what torch asks of a device of others, and what a CPU computes for it
const std::map<std::string, const char*> FOR = {{"aten::convolution_overrideable", "aten::convolution"},
                                                {"aten::convolution_backward_overrideable", "aten::convolution_backward"}};

at::Tensor state_of(const at::Generator& generator) { return at::Tensor::wrap_tensor_impl(generator.unsafeGetGeneratorImpl()->get_state()); }

struct Operation {
  const c10::OperatorHandle& op;
  torch::jit::Stack* stack;
  std::string name = op.schema().name();
  std::optional<c10::Device> device;
  std::vector<at::Tensor> inputs;  // of the device
  std::vector<std::pair<at::Generator, at::Generator>> generators;
  int who = 0;
  int64_t time = 0;
  bool masks = false;  // an index is a mask, whose size the host has to know

  void find_device(const c10::IValue& v) {
    if (device) return;
    if (v.isTensor() && v.toTensor().defined() && v.toTensor().device().type() == DEVICE) device = v.toTensor().device();
    if (v.isDevice()) device = v.toDevice();
    if (v.isTensorList())
      for (const at::Tensor& t : v.toTensorVector()) find_device(t);
  }
  void take(const at::Tensor& t, bool write, bool may_be_on_host) {
    if (!t.defined()) return;
    if (t.is_cpu()) {
      TORCH_CHECK(may_be_on_host, "simulated device: ", op.schema().operator_name(), ": a tensor of the host, ", t.sizes(), ", among tensors of the device");
      return;
    }
    if (t.device().type() != DEVICE) return;
    TORCH_CHECK(!device || *device == t.device(), "simulated device: ", op.schema().operator_name(), ": tensors of ", *device, " and ", t.device());
    device = t.device();
    inputs.push_back(t);
    touch(name, t, who, time, write);
  }
  void lend(c10::IValue& v, const c10::Argument& argument) {  // the host's view of an argument
    bool write = argument.alias_info() && argument.alias_info()->isWrite();
    if (v.isTensor()) {
      take(v.toTensor(), write, !write && v.toTensor().defined() && v.toTensor().dim() == 0);
      v = on_host(v.toTensor());
    } else if (v.isTensorList()) {
      std::vector<at::Tensor> all;
      for (const at::Tensor& t : v.toTensorVector()) take(t, write, name == "aten::_foreach_copy_"), all.push_back(on_host(t));
      v = all;
    } else if (v.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> all;
      for (const auto& t : v.toOptionalTensorVector()) {
        if (t) take(*t, write, INDEXING.count(name));
        masks = masks || (t && (t->scalar_type() == at::kBool || t->scalar_type() == at::kByte));
        all.push_back(t ? std::optional(on_host(*t)) : std::nullopt);
      }
      v = all;
    } else if (v.isDevice()) {
      v = c10::Device(c10::kCPU);
    } else if (argument.name() == "generator" && (v.isNone() || v.isGenerator())) {
      at::Generator own = v.isNone() ? hooks.getDefaultGenerator(-1) : v.toGenerator();
      TORCH_CHECK(own.device().type() == DEVICE, "simulated device: ", op.schema().operator_name(), ": expected a generator of the device, found one of ", own.device());
      at::Generator host = at::detail::createCPUGenerator();
      host.set_state(state_of(own));
      generators.emplace_back(own, host);
      v = host;
    }
  }
  at::Tensor back(const at::Tensor& t) {  // a result as a tensor of the device: a view of an input, or new
    if (!t.defined()) return t;
    if (t.numel())
      for (auto& input : inputs) {
        auto base = static_cast<char*>(input.storage().mutable_data());
        auto at = static_cast<char*>(t.data_ptr());
        if (at < base || at >= base + input.storage().nbytes()) continue;
        auto view = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(input.storage()), KEYS, t.dtype());
        view.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), (at - base) / t.element_size());
        return view;
      }
    auto fresh = empty_strided(t.sizes(), t.strides(), t.scalar_type(), std::nullopt, device, std::nullopt);
    on_host(fresh).copy_(t);
    touch(name, fresh, who, time, true);
    return fresh;
  }
  void run() {
    auto& schema = op.schema();
    auto& arguments = schema.arguments();
    size_t first = stack->size() - arguments.size();
    std::vector<c10::IValue> given(stack->begin() + first, stack->end());
    for (auto& v : given) find_device(v);
    if (!device || !device->has_index()) device = c10::Device(DEVICE, current);
    OnDevice on(device->index());
    {
      std::lock_guard<std::recursive_mutex> guard(lock);
      who = agent_now();
      time = next(who);
      for (size_t i = 0; i < arguments.size(); i++) lend((*stack)[first + i], arguments[i]);
    }
    bool resizes = std::any_of(arguments.begin(), arguments.end(), [](auto& a) { return a.is_out(); });
    bool waits = WAITING.count(name) || masks || (name == "aten::repeat_interleave" && !given.back().isInt());
    if (waits) host_waits(clock_of(who), name.c_str());
    // dropout in a kernel draws from the default generator, and takes none
    std::optional<at::Generator> of_host;
    if (op.hasTag(at::Tag::nondeterministic_seeded) && generators.empty()) {
      of_host = at::detail::getDefaultCPUGenerator();
      generators.emplace_back(hooks.getDefaultGenerator(-1), *of_host);
    }
    at::Tensor kept = of_host ? state_of(*of_host) : at::Tensor();
    if (of_host) of_host->set_state(state_of(generators[0].first));
    quiet++;
    try {
      if (resizes) {  // torch's own fallback: it may give the tensors of `out` another size
        for (size_t i = 0; i < arguments.size(); i++)
          if (!given[i].isGenerator() && arguments[i].name() != "generator") (*stack)[first + i] = given[i];
        at::native::cpu_fallback(op, stack);
      } else {
        at::AutoDispatchBelowADInplaceOrView below;
        if (name == "aten::convolution_backward_overrideable")  // the other one is given the size of the bias as well
          stack->insert(stack->begin() + first + 3, std::vector<int64_t>{(*stack)[first].toTensor().size(1)});
        if (auto found = FOR.find(name); found != FOR.end()) c10::Dispatcher::singleton().findSchemaOrThrow(found->second, "").callBoxed(stack);
        else op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
      }
    } catch (...) {
      quiet--;
      throw;
    }
    quiet--;
    for (auto& [own, host] : generators) own.set_state(state_of(host));
    if (of_host) of_host->set_state(kept);
    if (!resizes) give_back(schema, given);
  }
  void give_back(const c10::FunctionSchema& schema, const std::vector<c10::IValue>& given) {
    size_t first = stack->size() - schema.returns().size();
    std::lock_guard<std::recursive_mutex> guard(lock);
    for (size_t i = 0; i < schema.returns().size(); i++) {
      c10::IValue& v = (*stack)[first + i];
      auto* alias = schema.returns()[i].alias_info();
      if (alias && alias->isWrite()) {  // an argument that was changed in place
        for (size_t k = 0; k < given.size(); k++)
          if (auto* own = schema.arguments()[k].alias_info(); own && own->isWrite() && own->beforeSets() == alias->beforeSets()) v = given[k];
      } else if (v.isTensor()) {
        v = back(v.toTensor());
      } else if (v.isTensorList()) {
        std::vector<at::Tensor> all;
        for (const at::Tensor& t : v.toTensorVector()) all.push_back(back(t));
        v = all;
      }
    }
  }
};
void compute(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  operations++;
  raise_unraised();
  Operation{op, stack}.run();
}
}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &attention_kernel)
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {  // as CUDA's: products in the lower precision
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
}
// a copy conjugates and negates: torch's fallback would make a copy first, and so on for ever
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("as_strided", as_strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("view", at::native::view);
  m.impl("resize_", at::native::resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage_at);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_", set_nothing);
  m.impl("record_stream", record_stream);
  m.impl("histc", histc);
  for (auto& [name, of_cpu] : FOR) m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&compute>());
  m.impl("_has_compatible_shallow_copy_type", may_take_data);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;
  m.def("start", [](int64_t n, int64_t bytes, py::object f, py::object where) {
    devices = n;
    capacity = bytes;
    listener = f.release().ptr();
    locator = where.release().ptr();
    at::RegisterPrivateUse1HooksInterface(&hooks);
  });
  m.def("current_device", [] { return int(current); });
  m.def("set_device", [](int d) {
    TORCH_CHECK(d >= 0, "simulated device: no index");
    current = there(d);
  });
  m.def("device_count", [] { return int(devices); });
  m.def("see", [](int n) { devices = n; });
  m.def("default_generator", [](int i) { return generators()[i]; });
  m.def("used", [] { return used.load(); });
  m.def("peak", [] { return peak.load(); });
  m.def("get_stuck", [](int how) { stuck = how; });
  m.def("reports", [] { return reports; });
  m.def("operations", [] { return operations.load(); });
  m.def("reset_peak", [] { peak = used.load(); });
  m.def("capacity", [] { return capacity; });
  // for the process group, whose collectives are work on a stream of their own
  m.def("on_host", &on_host);
  m.def("new_stream", [] { return int64_t(streams++); });
  m.def("launch", [](int64_t stream, const std::vector<at::Tensor>& reads, const std::vector<at::Tensor>& writes, const std::string& what) {
    raise_unraised();
    std::lock_guard<std::recursive_mutex> guard(lock);
    int who = agent_of(current, stream);
    join(clocks[who], clocks[agent_now()]);
    int64_t time = next(who);
    for (auto& t : reads) touch(what, t, who, time, false);
    for (auto& t : writes) touch(what, t, who, time, true);
    return std::tuple(who, clocks[who], std::max(clocks[agent_now()][TIME], clocks[HOST][TIME]));
  });
  // for the clock: a kernel of the current stream, and the end of a collective, in nanoseconds
  m.def("spend", [](int64_t of_device, int64_t of_host) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    int who = agent_now();
    join(clocks[who], Clock{0, clocks[HOST][TIME]});
    int64_t start = clocks[who][TIME];
    clocks[who][TIME] += of_device;
    clocks[HOST][TIME] = std::max(clocks[HOST][TIME] + of_host, host_waited ? clocks[who][TIME] : 0);
    return std::tuple(who, start, clocks[who][TIME]);
  });
  m.def("host_spends", [](int64_t time) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    clocks[HOST][TIME] += time;
  });
  m.def("end_at", [](int agent, int64_t time) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    join(clocks[agent], Clock{0, time});
  });
  m.def("now", [] {
    std::lock_guard<std::recursive_mutex> guard(lock);
    int64_t latest = 0;
    for (auto& clock : clocks) latest = std::max(latest, clock[TIME]);
    return latest;
  });
  m.def("wait", [](const Clock& clock) {  // the current stream waits
    std::lock_guard<std::recursive_mutex> guard(lock);
    join(clocks[agent_now()], clock);
  });
  m.def("host_knows", [](const Clock& clock) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    join(clocks[HOST], clock);
  });
  m.def("has_waited", [](int agent, const Clock& clock) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    return known(clocks[agent_now()], agent) >= clock[agent];
  });
}
