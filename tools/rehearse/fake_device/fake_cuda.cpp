// A CUDA device without kernels: a guard and hooks that do nothing. Autograd gets devices and streams from them; those of
// torch's CUDA build would need a driver, and its CPU build has none. Torch looks up the hooks once, while it is being
// imported, so the library must be loaded before. The guard is set after it, in place of the CUDA build's own.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

c10::Stream default_stream() noexcept {
  return c10::Stream(c10::Stream::DEFAULT, c10::Device(c10::kCUDA, 0));
}

struct FakeGuard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device exchangeDevice(c10::Device) const override {
    return {c10::kCUDA, 0};
  }
  c10::Device getDevice() const override {
    return {c10::kCUDA, 0};
  }
  c10::Stream getStream(c10::Device) const noexcept override {
    return default_stream();
  }
  c10::Stream getNewStream(c10::Device, int) const override {
    return default_stream();
  }
  c10::Stream exchangeStream(c10::Stream) const noexcept override {
    return default_stream();
  }
};

struct FakeHooks final : at::CUDAHooksInterface {
  explicit FakeHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override {
    return true;
  }
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return 1;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  void setCurrentDevice(c10::DeviceIndex) const override {}
};

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, FakeHooks)

} // namespace

extern "C" void set_fake_guard() {
  static const c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, new FakeGuard());
}
