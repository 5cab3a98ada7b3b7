// A CUDA device in host memory, for a CPU build of torch. README.md says what it is for, and what it does not know.
//
// A CPU build leaves the dispatch key CUDA empty; this library, loaded before torch is imported, fills it:
//
//   Cards            who has how much of each card: this process, and all processes together
//   Guard, Hooks     what torch asks of devices: how many there are, which is current, pinned memory
//   fallback         every op on cuda tensors: torch's CPU kernel on aliases of the same bytes
//   copy_, item      where host and device meet: counted, and refused while a graph is captured
//   HostNccl         torch.distributed's NCCL: gloo on the same bytes
//   share, open      cudaIpcGetMemHandle, cudaIpcOpenMemHandle: memory that other processes map
//
// The Python side (card.py) is what `torch.cuda` does, reference implementations of fused kernels, and the lines of
// stalls.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/extension.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <mutex>
#include <sstream>

namespace {
using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::IntArrayRef;
using c10::IValue;

constexpr int kMostCards = 8;
constexpr int kMostProcesses = 256;
const c10::DispatchKeySet kOnCard(c10::DispatchKey::CUDA), kOnHost(c10::DispatchKey::CPU);
thread_local DeviceIndex current = 0;

Device card(int index) { return Device(c10::DeviceType::CUDA, static_cast<DeviceIndex>(index)); }
int64_t number_of(const char* variable, int64_t otherwise) {
  const char* text = std::getenv(variable);
  return text ? std::stoll(text) : otherwise;
}

// ---- what is counted, and stalls -------------------------------------------------------------------------------

struct Count {
  int64_t times = 0, bytes = 0;
};
std::mutex counts_lock;
std::map<std::pair<std::string, std::string>, Count> counts;  // by (kind, name)
std::atomic<bool> counting{false};
thread_local bool silent = false;  // while a graph is replayed: one launch, whatever is in it
PyObject* on_stall = nullptr;      // called as f(kind, name, bytes) while counting
thread_local bool capturing_here = false;
std::atomic<int> capturing_anywhere{0};  // captures that refuse what other threads do, too

void note(const char* kind, const std::string& name, int64_t bytes) {
  if (!counting || silent) return;
  std::lock_guard<std::mutex> held(counts_lock);
  auto& count = counts[{kind, name}];
  count.times += 1;
  count.bytes += bytes;
}

void check_capture(const std::string& what) {
  TORCH_CHECK(!capturing_here && !capturing_anywhere, "CUDA error: operation not permitted when stream is capturing: ",
              what, " on the host card");
}

// The host waits for the card: `kind` is "read" or "copy in".
void stall(const char* kind, const std::string& name, int64_t bytes) {
  check_capture(name);
  if (!counting || silent) return;
  note(kind, name, bytes);
  py::gil_scoped_acquire gil;
  if (!on_stall) return;
  PyObject* done = PyObject_CallFunction(on_stall, "ssL", kind, name.c_str(), static_cast<long long>(bytes));
  if (!done) throw py::error_already_set();
  Py_DECREF(done);
}

// ---- memory ----------------------------------------------------------------------------------------------------

// What each process holds of each card. In a file that RONDO_HOST_CARD_LEDGER names, shared by all processes, as a
// card's memory is; without it, of this process alone.
struct Ledger {
  struct Row {
    std::atomic<int64_t> process, held[kMostCards];
  } rows[kMostProcesses];

  static Ledger* open() {
    const char* path = std::getenv("RONDO_HOST_CARD_LEDGER");
    int file = path ? ::open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600) : -1;
    TORCH_CHECK(!path || (file >= 0 && ftruncate(file, sizeof(Ledger)) == 0), "host card: no ledger at ", path);
    int flags = path ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
    void* memory = mmap(nullptr, sizeof(Ledger), PROT_READ | PROT_WRITE, flags, file, 0);
    if (path) close(file);
    TORCH_CHECK(memory != MAP_FAILED, "host card: the ledger cannot be mapped");
    return static_cast<Ledger*>(memory);
  }

  Row& own() {
    int64_t me = getpid();
    for (auto& row : rows) {
      int64_t free = 0;
      if (row.process == me || row.process.compare_exchange_strong(free, me)) return row;
    }
    TORCH_CHECK(false, "host card: more than ", kMostProcesses, " processes use it");
  }

  int64_t held(int index) {
    int64_t sum = 0;
    for (auto& row : rows) {
      int64_t process = row.process;
      if (!process) continue;
      if (kill(static_cast<pid_t>(process), 0) != 0 && errno == ESRCH) {  // a process that ends gives all back
        for (auto& one : row.held) one = 0;
        row.process = 0;
      }
      sum += row.held[index];
    }
    return sum;
  }
};

// torch's caching allocator, without fragments: what was freed is kept for later until `empty`.
struct Cards {
  const int machine = static_cast<int>(number_of("RONDO_HOST_CARDS", 1));
  int64_t allocated[kMostCards] = {}, reserved[kMostCards] = {}, limit[kMostCards] = {};
  int64_t peak_allocated[kMostCards] = {}, peak_reserved[kMostCards] = {};
  std::mutex lock;

  // The numbers in the machine of the cards that this process sees.
  std::vector<int> visible() const {
    std::vector<int> all;
    const char* text = std::getenv("CUDA_VISIBLE_DEVICES");
    if (!text) {
      for (int i = 0; i < machine; i++) all.push_back(i);
      return all;
    }
    std::istringstream parts(text);
    for (std::string part; std::getline(parts, part, ',');) {
      if (part.find_first_not_of(" ") == std::string::npos) continue;
      int number = std::stoi(part);
      if (number < 0 || number >= machine) break;  // as CUDA does: those before count
      all.push_back(number);
    }
    return all;
  }

  // Before the first use; afterwards what the environment says does not matter any more.
  void begin() {
    if (!process_) {
      numbers_ = visible();
      ledger_ = Ledger::open();
      total_ = total();
      process_ = getpid();
    }
    TORCH_CHECK(process_ == getpid(), "Cannot re-initialize CUDA in forked subprocess. To use CUDA with "
                "multiprocessing, you must use the 'spawn' start method");
  }
  bool begun() const { return process_ != 0; }
  int64_t total() const { return process_ ? total_ : number_of("RONDO_HOST_CARD_BYTES", 80LL << 30); }
  int count() const { return static_cast<int>(process_ ? numbers_.size() : visible().size()); }
  int number(int index) {
    std::lock_guard<std::mutex> held(lock);
    begin();
    check(index);
    return numbers_[index];
  }
  int64_t free(int index) {
    int in_machine = number(index);  // first: it opens the ledger
    return total_ - ledger_->held(in_machine);
  }

  int64_t take(int index, int64_t bytes) {
    bytes = (bytes + 511) / 512 * 512;
    std::lock_guard<std::mutex> held(lock);
    begin();
    check(index);
    int64_t now = allocated[index] + bytes;
    if (now > reserved[index]) {
      int64_t more = now - reserved[index], left = total_ - ledger_->held(numbers_[index]);
      TORCH_CHECK_WITH(OutOfMemoryError, more <= left && (!limit[index] || now <= limit[index]),
          "CUDA out of memory. Tried to allocate ", bytes, " bytes. GPU ", index, " has a total capacity of ", total_,
          " bytes of which ", left, " bytes is free. Of the allocated memory ", allocated[index],
          " bytes is allocated by PyTorch, and ", reserved[index] - allocated[index], " bytes is reserved but ",
          "unallocated (host card)");
      hold(index, now);
    }
    allocated[index] = now;
    peak_allocated[index] = std::max(peak_allocated[index], now);
    return bytes;
  }
  void give(int index, int64_t bytes) {
    std::lock_guard<std::mutex> held(lock);
    allocated[index] -= bytes;
  }
  void empty() {
    std::lock_guard<std::mutex> held(lock);
    if (!process_) return;
    for (int i = 0; i < count(); i++) hold(i, allocated[i]);
  }
  void reset_peak(int index) {
    std::lock_guard<std::mutex> held(lock);
    peak_allocated[index] = allocated[index];
    peak_reserved[index] = reserved[index];
  }
  void check(int index) const {
    TORCH_CHECK(index >= 0 && index < count(), "CUDA error: invalid device ordinal: ", index, " of ", count(),
                " (host card)");
  }

 private:
  void hold(int index, int64_t bytes) {
    reserved[index] = bytes;
    peak_reserved[index] = std::max(peak_reserved[index], bytes);
    ledger_->own().held[numbers_[index]] = bytes;
  }
  std::vector<int> numbers_;
  Ledger* ledger_ = nullptr;
  pid_t process_ = 0;
  int64_t total_ = 0;
};
Cards& cards() {
  static auto* one = new Cards;  // outlives tensors that are freed at exit
  return *one;
}

// Bytes in a file without a name, which other processes open by this one's id and the file's number in it.
struct SharedMemory {
  static constexpr int64_t kHeader = 4096;  // before them: how many handles are under way or open elsewhere
  const int64_t bytes, id;
  const int file;
  char* const start;

  SharedMemory(int64_t size, int64_t number, int descriptor)
      : bytes(size), id(number), file(descriptor), start(map(descriptor, size)) {}
  ~SharedMemory() {
    munmap(start, kHeader + bytes);
    close(file);
  }
  SharedMemory(const SharedMemory&) = delete;
  static std::string name(int64_t number) { return "rondo-host-card-" + std::to_string(number); }
  static SharedMemory* make(int64_t bytes) {
    static std::atomic<int64_t> made{0};
    int64_t number = ++made;
    int file = memfd_create(name(number).c_str(), MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, kHeader + bytes) == 0, "host card: no memory to share");
    return new SharedMemory(bytes, number, file);
  }
  std::atomic<int64_t>& readers() const { return *reinterpret_cast<std::atomic<int64_t>*>(start); }
  void* data() const { return start + kHeader; }

 private:
  static char* map(int file, int64_t size) {
    void* memory = mmap(nullptr, kHeader + size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    TORCH_CHECK(memory != MAP_FAILED, "host card: shared memory cannot be mapped");
    return static_cast<char*>(memory);
  }
};

struct Limbo {  // what was freed here while others have it: it stays taken until they have closed it
  std::mutex lock;
  std::vector<std::tuple<std::unique_ptr<SharedMemory>, int, int64_t>> held;

  void put(std::unique_ptr<SharedMemory> memory, int index, int64_t bytes) {
    std::lock_guard<std::mutex> guard(lock);
    held.emplace_back(std::move(memory), index, bytes);
  }
  void collect() {
    std::lock_guard<std::mutex> guard(lock);
    auto closed = std::partition(held.begin(), held.end(), [](auto& one) { return std::get<0>(one)->readers() > 0; });
    for (auto one = closed; one != held.end(); one++) cards().give(std::get<1>(*one), std::get<2>(*one));
    held.erase(closed, held.end());
  }
};
Limbo& limbo() {
  static auto* one = new Limbo;
  return *one;
}

// As torch does, memory that others have closed is taken back where there is none left.
int64_t take(int index, int64_t bytes) {
  try {
    return cards().take(index, bytes);
  } catch (const c10::OutOfMemoryError&) {
    limbo().collect();
  }
  return cards().take(index, bytes);
}

struct Block {  // the memory of a storage on a card: bytes of its own, or those of a CPU kernel's result
  at::DataPtr memory;
  Tensor result;
  int index;
  int64_t bytes;
  std::unique_ptr<SharedMemory> shared = nullptr;  // where the bytes are, once another process may open them
  ~Block() {
    if (shared && shared->readers() > 0) {
      limbo().put(std::move(shared), index, bytes);
    } else {
      cards().give(index, bytes);
    }
  }
};
void drop_block(void* block) { delete static_cast<Block*>(block); }

struct CardAllocator final : c10::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, card(current)};
    int64_t taken = take(current, static_cast<int64_t>(bytes));
    auto* block = new Block{c10::GetCPUAllocator()->allocate(bytes), {}, current, taken};
    return {block->memory.get(), block, drop_block, card(current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return drop_block; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { memcpy(to, from, bytes); }
} card_allocator;

// torch's pinned allocator: each block a power of two, of which those that were freed serve only the same size.
struct PinnedAllocator final : c10::Allocator {
  struct Page {
    at::DataPtr memory;
    size_t bytes;
  };
  struct Size {
    int64_t used = 0, made = 0;
  };
  std::mutex lock;
  std::map<size_t, Size> sizes;
  std::map<const char*, size_t> pages;
  int64_t made = 0;

  at::DataPtr allocate(size_t bytes) override {
    if (!bytes) return c10::GetCPUAllocator()->allocate(0);
    size_t rounded = 1;
    while (rounded < bytes) rounded *= 2;
    std::lock_guard<std::mutex> held(lock);
    auto& size = sizes[rounded];
    if (size.used == size.made) {
      int64_t limit = number_of("RONDO_HOST_CARD_PINNED_BYTES", INT64_MAX);
      TORCH_CHECK(made + static_cast<int64_t>(rounded) <= limit, "CUDA error: out of memory: ", rounded,
                  " bytes of pinned memory beside ", made, " of ", limit, " (host card)");
      size.made++;
      made += static_cast<int64_t>(rounded);
    }
    size.used++;
    note("pinned", "memory", static_cast<int64_t>(bytes));
    auto* page = new Page{c10::GetCPUAllocator()->allocate(bytes), rounded};
    pages[static_cast<const char*>(page->memory.get())] = bytes;
    return {page->memory.get(), page, drop, Device(c10::DeviceType::CPU)};
  }
  static void drop(void* context);
  bool has(const void* data) {
    std::lock_guard<std::mutex> held(lock);
    auto after = pages.upper_bound(static_cast<const char*>(data));
    if (after == pages.begin()) return false;
    auto& [begin, bytes] = *std::prev(after);
    return static_cast<const char*>(data) < begin + bytes;
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { memcpy(to, from, bytes); }
};
PinnedAllocator& pinned() {
  static auto* one = new PinnedAllocator;
  return *one;
}
void PinnedAllocator::drop(void* context) {
  auto* page = static_cast<Page*>(context);
  {
    std::lock_guard<std::mutex> held(pinned().lock);
    pinned().sizes[page->bytes].used--;
    pinned().pages.erase(static_cast<const char*>(page->memory.get()));
  }
  delete page;
}

// ---- devices ---------------------------------------------------------------------------------------------------

DeviceIndex exchange(DeviceIndex index) {
  auto before = current;
  if (index >= 0) current = index;
  return before;
}

// One stream per card, on which everything has happened already.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  Device exchangeDevice(Device to) const override { return card(exchange(to.index())); }
  Device getDevice() const override { return card(current); }
  void setDevice(Device to) const override { exchange(to.index()); }
  void uncheckedSetDevice(Device to) const noexcept override { exchange(to.index()); }
  c10::Stream getStream(Device of) const override {
    return c10::Stream(c10::Stream::DEFAULT, of.index() < 0 ? card(current) : of);
  }
  c10::Stream getDefaultStream(Device of) const override { return getStream(of); }
  c10::Stream getNewStream(Device of, int) const override { return getStream(of); }
  c10::Stream getStreamFromGlobalPool(Device of, bool) const override { return getStream(of); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(cards().count()); }
  void record(void** event, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {
    static int any;
    *event = &any;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct CUDAHooks : at::CUDAHooksInterface {  // torch looks it up by just this name
  CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return cards().count() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return cards().begun(); }
  int getNumGPUs() const override { return cards().count(); }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(cards().count()); }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex to) const override { exchange(to); }
  DeviceIndex exchangeDevice(DeviceIndex to) const override { return exchange(to); }
  DeviceIndex maybeExchangeDevice(DeviceIndex to) const override { return exchange(to); }
  bool isPinnedPtr(const void* data) const override { return pinned().has(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return &card_allocator; }
  Device getDeviceFromPtr(void*) const override { return card(current); }
  void deviceSynchronize(DeviceIndex) const override {}
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks);

struct On {  // a card is current for a while
  explicit On(int index) : before(exchange(static_cast<DeviceIndex>(index))) {}
  ~On() { current = before; }
  DeviceIndex before;
};

// ---- one storage, two tensors ----------------------------------------------------------------------------------

Tensor shaped(c10::Storage storage, c10::DispatchKeySet keys, const Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

// The same bytes as a CPU tensor, which keeps them alive.
Tensor host(const Tensor& on_card) {
  auto* keep = new c10::Storage(on_card.storage());
  at::DataPtr data(keep->mutable_data(), keep, [](void* held) { delete static_cast<c10::Storage*>(held); },
                   Device(c10::DeviceType::CPU));
  c10::Storage storage(c10::Storage::use_byte_size_t(), keep->nbytes(), std::move(data), c10::GetCPUAllocator(), true);
  auto alias = shaped(std::move(storage), kOnHost, on_card);
  if (on_card.is_conj()) alias._set_conj(true);
  if (on_card.is_neg()) alias._set_neg(true);
  return alias;
}

c10::Storage adopted_storage(const Tensor& result, int index) {
  auto bytes = static_cast<int64_t>(result.storage().nbytes());
  auto* block = new Block{{}, result, index, bytes ? take(index, bytes) : 0};
  at::DataPtr data(result.storage().mutable_data(), block, drop_block, card(index));
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes, std::move(data), &card_allocator, true);
}

// A fresh result of a CPU kernel as a tensor on a card.
Tensor adopt(const Tensor& result, int index) { return shaped(adopted_storage(result, index), kOnCard, result); }

// What reading or writing all of a tensor moves; a dimension of stride 0 is there once.
int64_t bytes_of(const Tensor& tensor) {
  auto bytes = static_cast<int64_t>(tensor.itemsize());
  for (int64_t dim = 0; dim < tensor.dim(); dim++)
    if (tensor.stride(dim) || !tensor.size(dim)) bytes *= tensor.size(dim);
  return bytes;
}

// ---- every op --------------------------------------------------------------------------------------------------

// Ops whose result has a size that only the card knows: the host waits for it.
bool depends_on_data(const std::string& name, c10::ArrayRef<IValue> args) {
  static const std::set<std::string> always{"aten::nonzero", "aten::equal", "aten::masked_select", "aten::bincount",
                                            "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive"};
  if (always.count(name)) return true;
  if (name == "aten::repeat_interleave") return args.back().isNone();  // output_size
  if (name != "aten::_index_put_impl_") return false;
  const auto& values = args[2].toTensor();
  if (values.numel() == 1 && !args[3].toBool()) return false;  // becomes masked_fill
  for (const auto& index : args[1].toOptionalTensorVector())
    if (index && index->defined() && (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte)) return true;
  return false;
}

struct Call {  // the arguments of one op: those on a card, beside their aliases on the host
  const c10::OperatorHandle& op;
  const std::string name = op.schema().name();
  std::vector<std::pair<Tensor, Tensor>> pairs = {};
  int index = -1;
  int64_t bytes = 0;

  void refuse(const std::string& one, const std::string& other) const {
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", one, " and ",
                other, "! (in ", name, ", host card)");
  }
  // Whether a CPU tensor of one number may stand here: kernels take it as an argument.
  Tensor aliased(const Tensor& tensor, bool number_allowed) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      if (tensor.dim() > 0 || !number_allowed) host_arguments = true;
      return tensor;
    }
    if (index >= 0 && index != tensor.device().index()) refuse(card(index).str(), tensor.device().str());
    index = tensor.device().index();
    for (auto& [on_card, alias] : pairs)
      if (on_card.is_same(tensor)) return alias;
    bytes += bytes_of(tensor);
    return pairs.emplace_back(tensor, host(tensor)).second;
  }
  bool host_arguments = false;

  void take(IValue& value, const c10::Argument& argument) {
    bool written = argument.alias_info() && argument.alias_info()->isWrite();
    if (value.isTensor()) {
      value = aliased(value.toTensor(), !written);
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(aliased(tensor, false));
      value = list;
    } else if (value.isOptionalTensorList()) {  // indices, which may be on the host: they are copied (by index, before)
      c10::List<std::optional<Tensor>> list;
      for (const auto& one : value.toOptionalTensorVector()) {
        std::optional<Tensor> tensor = one;
        if (tensor && tensor->defined() && !tensor->is_cuda() && name != "aten::index")
          stall("copy in", name, bytes_of(*tensor));
        if (tensor && tensor->is_cuda()) tensor = aliased(*tensor, false);
        list.push_back(tensor);
      }
      value = list;
    } else if (value.isDevice()) {
      if (index < 0) index = value.toDevice().index();
      value = Device(c10::DeviceType::CPU);
    } else if (value.isGenerator()) {
      TORCH_CHECK(!value.toGenerator().defined() || value.toGenerator().device().is_cuda(), "Expected a 'cuda' ",
                  "device type for generator but found 'cpu' (host card)");
    }
  }
  // The kernel's result as the caller sees it: an argument, a view of one, or something new.
  Tensor returned(const Tensor& result, bool& fresh) {
    if (!result.defined() || result.is_cuda()) return result;
    for (auto& [on_card, alias] : pairs)
      if (alias.is_same(result)) return on_card;
    for (auto& [on_card, alias] : pairs)
      if (result.storage().data() && result.storage().data() == on_card.storage().data())
        return shaped(c10::Storage(on_card.storage()), kOnCard, result);
    fresh = true;
    bytes += bytes_of(result);
    return adopt(result, index < 0 ? current : index);
  }
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  Call call{op};
  auto arguments = schema.arguments().size(), results = schema.returns().size();
  auto begin = stack->size() - arguments;
  if (depends_on_data(call.name, c10::ArrayRef<IValue>(stack->data() + begin, arguments))) stall("read", call.name, 0);
  for (size_t i = 0; i < arguments; i++) call.take((*stack)[begin + i], schema.arguments()[i]);
  if (call.host_arguments && !call.pairs.empty()) call.refuse(card(call.index).str(), "cpu");
  On device(call.index);
  op.redispatchBoxed(kOnHost, stack);
  for (auto& [on_card, alias] : call.pairs) {  // results that were written into, and made larger for it
    auto* impl = on_card.unsafeGetTensorImpl();
    if (alias.storage().data() != on_card.storage().data())
      impl->set_storage_keep_dtype(adopted_storage(alias, call.index));
    if (alias.sizes() != on_card.sizes() || alias.strides() != on_card.strides())
      impl->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
  }
  bool kernel = schema.is_mutable();  // else, without a fresh result, a view
  for (size_t i = stack->size() - results; i < stack->size(); i++) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = call.returned(value.toTensor(), kernel);
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(call.returned(tensor, kernel));
      value = list;
    } else {
      kernel = true;
    }
  }
  if (kernel) note("kernel", call.name, call.bytes);
}

// ---- ops of its own: tensors without values, views, storages ---------------------------------------------------

using Type = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using Format = std::optional<at::MemoryFormat>;

Tensor empty(IntArrayRef size, Type type, Layout, std::optional<Device> device, std::optional<bool>, Format format) {
  On on(device ? device->index() : -1);
  return at::detail::empty_generic(size, &card_allocator, kOnCard, c10::dtype_or_default(type), format);
}
Tensor empty_strided(IntArrayRef size, IntArrayRef stride, Type type, Layout, std::optional<Device> device,
                     std::optional<bool>) {
  On on(device ? device->index() : -1);
  return at::detail::empty_strided_generic(size, stride, &card_allocator, kOnCard, c10::dtype_or_default(type));
}
Tensor as_strided(const Tensor& self, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
Tensor view(const Tensor& self, IntArrayRef size) { return at::native::view(self, size); }
Tensor reshape_alias(const Tensor& self, IntArrayRef size, IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}
Tensor unfold(const Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(self, dim, size, step);
}
void resize_storage(const c10::Storage& storage, int64_t bytes) {
  TORCH_CHECK(storage.data_ptr().get_deleter() == drop_block || !storage.nbytes(),
              "Trying to resize storage that is not resizable (of another process, host card)");
  On on(storage.device().index());
  auto* impl = storage.unsafeGetStorageImpl();
  auto data = card_allocator.allocate(bytes);
  if (auto kept = std::min(bytes, static_cast<int64_t>(impl->nbytes()))) memcpy(data.get(), impl->data(), kept);
  impl->set_data_ptr(std::move(data));
  impl->set_nbytes(bytes);
}
const Tensor& resize_(const Tensor& self, IntArrayRef size, Format) {
  auto bytes = static_cast<int64_t>(
      at::detail::computeStorageNbytesContiguous(size, self.itemsize(), self.storage_offset()));
  if (bytes > static_cast<int64_t>(self.storage().nbytes())) resize_storage(self.storage(), bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}
Tensor& set_storage(Tensor& self, at::Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (stride.size() == size.size() && !size.empty()) {
    impl->set_sizes_and_strides(size, stride, offset);
  } else {
    impl->set_sizes_contiguous(size);
    impl->set_storage_offset(offset);
  }
  return self;
}
Tensor& set_whole_storage(Tensor& self, at::Storage storage) {
  auto numbers = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_storage(self, std::move(storage), 0, {numbers}, {});
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
void record_stream(Tensor&, at::Stream) {}

// ---- where host and card meet ----------------------------------------------------------------------------------

at::Scalar local_scalar(const Tensor& self) {
  stall("read", "item", static_cast<int64_t>(self.itemsize()));
  return at::_local_scalar_dense(host(self));
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_cuda() && source.is_cuda()) {
    host(self).copy_(host(source));
    note("kernel", "aten::copy_", bytes_of(self) + bytes_of(source));
    return self;
  }
  // CUDA copies behind the host's back only what is pinned. From other memory it first copies to a buffer of its
  // own ("staged": the host works, and waits for no kernel); into other memory it waits.
  bool in = self.is_cuda(), behind = non_blocking && pinned().has((in ? source : self).storage().data());
  int64_t bytes = bytes_of(in ? source : self);
  if (behind) {
    note(in ? "copy in, async" : "copy out, async", "copy_", bytes);
  } else if (in && non_blocking) {
    check_capture("copy_ of memory that is not pinned");
    note("copy in, staged", "copy_", bytes);
  } else {
    stall(in ? "copy in" : "read", in ? "copy_" : "copy out", bytes);
  }
  if (in) {
    host(self).copy_(source);
  } else {
    self.copy_(host(source));
  }
  return self;
}

// ---- memory of other processes ---------------------------------------------------------------------------------

using Handle = std::tuple<int64_t, int, int64_t, int>;  // process, its file, which one that is, card of the machine

// cudaIpcGetMemHandle, of a storage: its bytes move to memory that others can map. Each handle is to be opened once.
Handle share(const c10::Storage& storage) {
  limbo().collect();
  auto* impl = storage.unsafeGetStorageImpl();
  TORCH_CHECK(impl->data_ptr().get_deleter() == drop_block,
              "CUDA error: invalid argument: this memory is another process's (host card)");
  auto* block = static_cast<Block*>(impl->data_ptr().get_context());
  if (!block->shared) {
    std::unique_ptr<SharedMemory> shared(SharedMemory::make(static_cast<int64_t>(impl->nbytes())));
    memcpy(shared->data(), impl->data(), impl->nbytes());
    void* data = shared->data();
    auto* moved = new Block{{}, {}, block->index, std::exchange(block->bytes, 0), std::move(shared)};
    block = moved;
    impl->set_data_ptr(at::DataPtr(data, moved, drop_block, card(moved->index)));
  }
  block->shared->readers()++;
  return {getpid(), block->shared->file, block->shared->id, cards().number(block->index)};
}

std::unique_ptr<SharedMemory> find(const Handle& handle, int64_t bytes) {
  auto [process, file, id, number] = handle;
  std::string path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(file);
  char target[64] = {};
  auto length = readlink(path.c_str(), target, sizeof(target) - 1);
  bool there = length > 0 && std::string(target) == "/memfd:" + SharedMemory::name(id) + " (deleted)";
  int mine = there ? ::open(path.c_str(), O_RDWR | O_CLOEXEC) : -1;
  TORCH_CHECK(mine >= 0, "CUDA error: invalid resource handle: process ", process, " has closed this memory, or has ",
              "ended (host card)");
  return std::make_unique<SharedMemory>(bytes, id, mine);
}

void close_opened(void* memory) {
  std::unique_ptr<SharedMemory> opened(static_cast<SharedMemory*>(memory));
  opened->readers()--;
}

// cudaIpcOpenMemHandle: a storage of the same bytes, which this process's allocator knows nothing of.
c10::Storage open_shared(int index, const Handle& handle, int64_t bytes) {
  auto [process, file, id, number] = handle;
  TORCH_CHECK(process != getpid(), "CUDA error: invalid device context: a process cannot open its own memory (host card)");
  TORCH_CHECK(cards().number(index) == number, "CUDA error: invalid device: memory of card ", number, ", opened on ",
              cards().number(index), " (host card)");
  auto opened = find(handle, bytes);
  void* data = opened->data();
  at::DataPtr pointer(data, opened.release(), close_opened, card(index));
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes, std::move(pointer), nullptr, false);
}

// ---- collectives -----------------------------------------------------------------------------------------------

using Work = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<Tensor>;

struct Together final : c10d::Work {  // the messages of a batch
  std::vector<::Work> works;
  explicit Together(std::vector<::Work> all) : works(std::move(all)) {}
  bool isCompleted() override {
    return std::all_of(works.begin(), works.end(), [](auto& work) { return work->isCompleted(); });
  }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds timeout) override {
    for (auto& work : works) work->wait(timeout);
    return true;
  }
};

struct HostNccl final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> gloo;
  bool coalescing = false;
  std::vector<Work> batch;

  explicit HostNccl(c10::intrusive_ptr<c10d::Backend> inner)
      : c10d::Backend(inner->getRank(), inner->getSize()), gloo(std::move(inner)) {}
  const std::string getBackendName() const override { return "nccl"; }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override { gloo->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo->getSequenceNumberForGroup(); }
  void eagerConnectSingleDevice(Device) override {}
  void abort() override { gloo->abort(); }
  void shutdown() override { gloo->shutdown(); }

  // What NCCL asks of every tensor.
  static Tensor on_host(const Tensor& tensor) {
    TORCH_CHECK(tensor.is_cuda(), "No backend type associated with device type ", tensor.device().type(),
                ": NCCL takes tensors of CUDA devices (host card)");
    TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous (NCCL, host card)");
    return host(tensor);
  }
  static Tensors on_host(const Tensors& tensors) {
    Tensors all;
    for (auto& tensor : tensors) all.push_back(on_host(tensor));
    return all;
  }
  static std::vector<Tensors> on_host(const std::vector<Tensors>& lists) {
    std::vector<Tensors> all;
    for (auto& list : lists) all.push_back(on_host(list));
    return all;
  }
  static int64_t sum_bytes(const Tensors& tensors) {
    int64_t sum = 0;
    for (auto& tensor : tensors) sum += bytes_of(tensor);
    return sum;
  }
  // Done when the call returns: kernels here are, too, and nothing orders them after a message that is under way.
  static Work done(const Work& work, const char* name, int64_t bytes) {
    note("collective", name, bytes);
    work->wait();
    return work;
  }
  Work message(const Work& work, const char* name, int64_t bytes) {
    if (!coalescing) {
      done(work, name, bytes);
      return c10::make_intrusive<Together>(std::vector<Work>{});  // gloo's would wait for one more message
    }
    note("collective", name, bytes);
    batch.push_back(work);
    return work;
  }
  void startCoalescing() override { coalescing = true; }
  Work endCoalescing() override {
    coalescing = false;
    return c10::make_intrusive<Together>(std::exchange(batch, {}));
  }
  // gloo has no mean: the sum, divided.
  template <class Options>
  bool as_sum(Options& options) const {
    if (options.reduceOp != c10d::ReduceOp::AVG) return false;
    options.reduceOp = c10d::ReduceOp::SUM;
    return true;
  }

  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto on = on_host(tensors);
    return done(gloo->broadcast(on, options), "broadcast", sum_bytes(on));
  }
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& given) override {
    auto on = on_host(tensors);
    auto options = given;
    bool mean = as_sum(options);
    auto work = done(gloo->allreduce(on, options), "all_reduce", sum_bytes(on));
    if (mean) for (auto& tensor : on) tensor.div_(getSize());
    return work;
  }
  Work reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto on = on_host(tensors);
    return done(gloo->reduce(on, options), "reduce", sum_bytes(on));
  }
  Work allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto to = on_host(outputs);
    auto from = on_host(inputs);
    return done(gloo->allgather(to, from, options), "all_gather", sum_bytes(from));
  }
  Work _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    auto to = on_host(output), from = on_host(input);
    return done(gloo->_allgather_base(to, from, options), "all_gather", bytes_of(to));
  }
  Work allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                       const c10d::AllgatherOptions& options) override {
    auto to = on_host(outputs), from = on_host(inputs);
    for (size_t i = 0; i < to.size(); i++) gloo->_allgather_base(to[i], from[i], options)->wait();
    return done(c10::make_intrusive<Together>(std::vector<Work>{}), "all_gather", sum_bytes(to));
  }
  Work _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& given) override {
    auto to = on_host(output), from = on_host(input);
    auto options = given;
    bool mean = as_sum(options);
    auto work = done(gloo->_reduce_scatter_base(to, from, options), "reduce_scatter", bytes_of(from));
    if (mean) to.div_(getSize());
    return work;
  }
  Work reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                       const c10d::ReduceScatterOptions& options) override {
    for (size_t i = 0; i < outputs.size(); i++) _reduce_scatter_base(outputs[i], inputs[i], options)->wait();
    return c10::make_intrusive<Together>(std::vector<Work>{});
  }
  Work alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& to_sizes, std::vector<int64_t>& from_sizes,
                     const c10d::AllToAllOptions& options) override {
    auto to = on_host(output), from = on_host(input);
    return done(gloo->alltoall_base(to, from, to_sizes, from_sizes, options), "all_to_all", bytes_of(from));
  }
  Work send(Tensors& tensors, int to, int tag) override {
    auto on = on_host(tensors);
    return message(gloo->send(on, to, tag), "send", sum_bytes(on));
  }
  Work recv(Tensors& tensors, int from, int tag) override {
    auto on = on_host(tensors);
    return message(gloo->recv(on, from, tag), "recv", sum_bytes(on));
  }
  Work barrier(const c10d::BarrierOptions& options) override { return done(gloo->barrier(options), "barrier", 0); }
};

c10::intrusive_ptr<HostNccl> make_nccl(const py::object& store, int rank, int size, const py::object& options) {
  auto make = py::module_::import("torch._C._distributed_c10d").attr("ProcessGroupGloo");
  auto gloo = make(store, rank, size, py::arg("timeout") = options.attr("_timeout"));
  return c10::make_intrusive<HostNccl>(gloo.cast<c10::intrusive_ptr<c10d::Backend>>());
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("unfold", unfold);
  library.impl("resize_", resize_);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("record_stream", record_stream);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("copy_", copy_);
}
}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("device_count", [] { return cards().count(); });
  module.def("number", [](int index) { return cards().number(index); });
  module.def("begun", [] { return cards().begun(); });
  module.def("current", [] { return static_cast<int>(current); });
  module.def("exchange", [](int index) { return static_cast<int>(exchange(static_cast<DeviceIndex>(index))); });
  module.def("total", [] { return cards().total(); });
  module.def("free", [](int index) { return cards().free(index); });
  module.def("allocated", [](int index) { return cards().allocated[index]; });
  module.def("reserved", [](int index) { return cards().reserved[index]; });
  module.def("peak_allocated", [](int index) { return cards().peak_allocated[index]; });
  module.def("peak_reserved", [](int index) { return cards().peak_reserved[index]; });
  module.def("reset_peak", [](int index) { cards().reset_peak(index); });
  module.def("set_limit", [](int index, int64_t bytes) { cards().limit[index] = bytes; });
  module.def("empty_cache", [] { cards().empty(); });
  module.def("share", &share);
  module.def("open_shared", &open_shared);
  module.def("close_handle", [](const Handle& handle) { find(handle, 0)->readers()--; });
  module.def("collect", [] { limbo().collect(); });
  module.def("pinned_bytes", [] { return pinned().made; });
  module.def("resize_storage", [](at::Storage storage, int64_t bytes) { resize_storage(storage, bytes); });
  module.def("host", &host);
  module.def("adopt", &adopt);
  module.def("note", [](const char* kind, const std::string& name, int64_t bytes) { note(kind, name, bytes); });
  module.def("stall", [](const char* kind, const std::string& name, int64_t bytes) { stall(kind, name, bytes); });
  module.def("silence", [](bool on) { silent = on; });
  module.def("capture", [](bool on, bool everywhere) {
    capturing_here = on;
    if (everywhere) capturing_anywhere += on ? 1 : -1;
  });
  module.def("capturing", [] { return capturing_here; });
  module.def("begin_counts", [](py::object hook) {
    std::lock_guard<std::mutex> held(counts_lock);
    counts.clear();
    Py_XDECREF(on_stall);
    on_stall = hook.release().ptr();
    counting = true;
  });
  module.def("end_counts", [] {
    counting = false;
    std::lock_guard<std::mutex> held(counts_lock);
    py::dict all;
    for (auto& [key, count] : counts) all[py::cast(key)] = py::make_tuple(count.times, count.bytes);
    return all;
  });
  py::class_<HostNccl, c10::intrusive_ptr<HostNccl>, c10d::Backend>(module, "ProcessGroupNCCL")
      .def(py::init(&make_nccl));
}
