//! `sallyport`: see the library for everything.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    sallyport::run()
}
