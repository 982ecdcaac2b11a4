//! The `envd` binary: see the library.

fn main() {
    println!("{}", envd::VERSION);
}
