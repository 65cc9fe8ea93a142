// One line for each test, and a last line that counts them.
#pragma once

#include <cstdio>
#include <string>

namespace orchard_test {

class Report {
 public:
  // An empty `defect` passes.
  void test(const std::string &name, const std::string &defect) {
    ++(defect.empty() ? passed_ : failed_);
    if (defect.empty()) {
      std::printf("pass  %s\n", name.c_str());
    } else {
      std::printf("FAIL  %s: %s\n", name.c_str(), defect.c_str());
    }
    std::fflush(stdout);
  }
  void skip(const std::string &name, const std::string &why) {
    std::printf("skip  %s: %s\n", name.c_str(), why.c_str());
  }
  int finish() const {
    std::printf("%d passed, %d failed\n", passed_, failed_);
    return failed_ != 0 || passed_ == 0;
  }

 private:
  int passed_ = 0, failed_ = 0;
};

#if defined(__SANITIZE_THREAD__)
inline constexpr bool kThreadSanitizer = true, kAddressSanitizer = false;
#elif defined(__SANITIZE_ADDRESS__)
inline constexpr bool kThreadSanitizer = false, kAddressSanitizer = true;
#elif defined(__has_feature)
inline constexpr bool kThreadSanitizer = __has_feature(thread_sanitizer);
inline constexpr bool kAddressSanitizer = __has_feature(address_sanitizer);
#else
inline constexpr bool kThreadSanitizer = false, kAddressSanitizer = false;
#endif

}  // namespace orchard_test
