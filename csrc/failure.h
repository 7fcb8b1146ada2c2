// How a call fails: a CKV_ code and one sentence. Thrown inside, turned into a code at the C
// boundary.
#pragma once

#include <exception>
#include <string>
#include <utility>

namespace ckv {

class Failure : public std::exception {
 public:
  Failure(int code, std::string text) : code_(code), text_(std::move(text)) {}
  int code() const { return code_; }
  const char *what() const noexcept override { return text_.c_str(); }

 private:
  int code_;
  std::string text_;
};

}  // namespace ckv
