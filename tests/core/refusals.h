#pragma once

#include <doctest/doctest.h>

#include <initializer_list>
#include <string>

namespace kvburst::testing {

/// Checks that `call` throws an `Error` whose message has every one of `words`. Another kind of
/// exception fails the test.
template <class Error, class Call>
void check_refused(Call&& call, std::initializer_list<std::string> words) {
  std::string message;
  try {
    call();
  } catch (const Error& error) {
    message = error.what();
  }
  REQUIRE_MESSAGE(!message.empty(), "was not refused; its message should have named ",
                  *words.begin());
  for (const std::string& word : words) {
    CHECK_MESSAGE(message.find(word) != std::string::npos, "\"", message, "\" does not name ",
                  word);
  }
}

}  // namespace kvburst::testing
