// What autograd asks of CUDA, for a build of torch that has none: it then runs backward passes of fake tensors.
// Devices and streams are numbers; events are nothing, as nothing is computed.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

constexpr DeviceIndex kDevices = 8;
thread_local DeviceIndex device_now = 0;
thread_local c10::StreamId stream_now = 0;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device next) const override {
    const Device before(DeviceType::CUDA, device_now);
    device_now = next.index();
    return before;
  }
  Device getDevice() const override { return Device(DeviceType::CUDA, device_now); }
  void setDevice(Device next) const override { device_now = next.index(); }
  void uncheckedSetDevice(Device next) const noexcept override { device_now = next.index(); }
  Stream getStream(Device of) const override { return Stream(Stream::UNSAFE, of, stream_now); }
  Stream getDefaultStream(Device of) const override { return Stream(Stream::UNSAFE, of, 0); }
  Stream getNewStream(Device of, int) const override { return Stream(Stream::UNSAFE, of, 1); }
  Stream getStreamFromGlobalPool(Device of, bool) const override { return Stream(Stream::UNSAFE, of, 1); }
  Stream exchangeStream(Stream next) const override {
    const Stream before(Stream::UNSAFE, next.device(), stream_now);
    stream_now = next.id();
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return kDevices; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex current_device() const override { return device_now; }
  DeviceIndex getCurrentDevice() const override { return device_now; }
  void setCurrentDevice(DeviceIndex next) const override { device_now = next; }
  DeviceIndex exchangeDevice(DeviceIndex next) const override { return std::exchange(device_now, next); }
  DeviceIndex maybeExchangeDevice(DeviceIndex next) const override { return exchangeDevice(next); }
  long versionCuDNN() const override { return 0; }
  long versionRuntimeCuDNN() const override { return 0; }
  bool isPinnedPtr(const void*) const override { return true; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetDefaultCPUAllocator(); }
  void deviceSynchronize(DeviceIndex) const override {}
};

}  // namespace

// A build for CUDA registers its own guard when it is loaded: this is called after that.
extern "C" void take_over() {
  static const Guard guard;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(&guard);
}

namespace at {
// In front of those of a build for CUDA, which come later.
C10_REGISTER_TYPED_CLASS_WITH_PRIORITY(CUDAHooksRegistry, "CUDAHooks", c10::REGISTRY_PREFERRED, Hooks)
}

// What a build for CUDA asks its own libraries for DDP's timers: these come before them, and need no driver.
// A build without CUDA has no use for them.
extern "C" {
int cudaGetDeviceCount(int* count) { *count = kDevices; return 0; }
int cudaGetDevice(int* device) { *device = device_now; return 0; }
int cudaSetDevice(int) { return 0; }
int cudaGetLastError() { return 0; }
int cudaPeekAtLastError() { return 0; }
int cudaDriverGetVersion(int* version) { *version = 13000; return 0; }
int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { *least = 0; *greatest = -1; return 0; }
int cudaStreamCreateWithPriority(void** stream, unsigned, int) { *stream = stream; return 0; }
int cudaStreamIsCapturing(void*, int* status) { *status = 0; return 0; }
int cudaEventCreateWithFlags(void** event, unsigned) { *event = event; return 0; }
int cudaEventRecord(void*, void*) { return 0; }
int cudaEventRecordWithFlags(void*, void*, unsigned) { return 0; }
int cudaEventQuery(void*) { return 0; }
int cudaEventSynchronize(void*) { return 0; }
int cudaEventElapsedTime(float* time, void*, void*) { *time = 1; return 0; }
int cudaEventDestroy(void*) { return 0; }
}

namespace c10::cuda {
int GetDevice(DeviceIndex* device) { *device = device_now; return 0; }
int SetDevice(DeviceIndex, bool) { return 0; }
int MaybeSetDevice(DeviceIndex) { return 0; }
DeviceIndex ExchangeDevice(DeviceIndex) { return device_now; }
DeviceIndex MaybeExchangeDevice(DeviceIndex) { return device_now; }
bool hasPrimaryContext(DeviceIndex) { return true; }
}  // namespace c10::cuda
