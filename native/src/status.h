// The calling thread's last error.
#pragma once

namespace orchard {

int succeed() noexcept;  // clears it; ORCHARD_OK
__attribute__((format(printf, 2, 3))) int fail(int status, const char *format,
                                               ...) noexcept;  // sets it; `status`

}  // namespace orchard
