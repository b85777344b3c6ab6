"""Activations from the literature that the catalog does not have, as a user writes them."""

# name | formula | source; without one it is a textbook form, or a variant of the last
TABLE = """
squareplus | (x + sqrt(x**2 + 4))/2 | Barron, 2021
bent_identity | (sqrt(x**2 + 1) - 1)/2 + x | known as the bent identity; Kunc & Kléma's survey, 2024
isru | x/sqrt(1 + x**2) | Carlile et al., 2017
isrlu | where(x >= 0, x, x/sqrt(1 + x**2)) |
elliott | 0.5*x/(1 + abs(x)) + 0.5 | Elliott, 1993
elliott_of_softsign | 0.5*softsign(x) + 0.5 |
scaled_softsign | 1.5*x/(0.5 + abs(x)) | Pishchik, 2023
pflu | x*(1 + x/sqrt(1 + x**2))/2 | M. Zhu et al., 2021
fpflu | where(x >= 0, x, x + x**2/sqrt(1 + x**2)) |
smu_1 | ((1 + 0.25)*x + sqrt((1 - 0.25)**2*x**2 + 0.5**2))/2 | Biswas et al., 2021: from a square root
soft_modulus_q | where(abs(x) <= 1, x**2*(2 - abs(x)), abs(x)) | Vallés-Pérez et al., 2023
soft_modulus_t | x*tanh(x/0.01) |
lecun_tanh | 1.7159*tanh(2/3*x) | LeCun et al., 1998
penalized_tanh | where(x > 0, tanh(x), 0.25*tanh(x)) | Xu et al., 2016
lisht | x*tanh(x) | Roy et al., 2019
tanhexp | x*tanh(exp(x)) | X. Liu & Di, 2020; Fernandez & Mali, 2024, call it TeLU
tanhsoft_1 | tanh(0.87*x)*log(1 + exp(x)) | Biswas et al., 2021
tanhsoft_2 | x*tanh(0.6*exp(x)) |
tanh_written | (exp(x) - exp(-x))/(exp(x) + exp(-x)) | textbook definitions
bipolar_sigmoid | (1 - exp(-x))/(1 + exp(-x)) |
arctan | atan(x) |
arcsinh | asinh(x) |
calu | x*(atan(x)/pi + 1/2) | Kunc & Kléma's survey, 2024: x times Cauchy's distribution function
lalu | x*where(x >= 0, 1 - exp(-x)/2, exp(x)/2) |
sigmoid_written | 1/(1 + exp(-x)) |
sigmoid_quotient | exp(x)/(1 + exp(x)) |
sigmoid_from_tanh | (1 + tanh(x/2))/2 |
swish_beta | x/(1 + exp(-1.5*x)) | Ramachandran et al., 2017
e_swish | 1.375*silu(x) | Alcaide, 2018
dsilu | sigmoid(x)*(1 + x*(1 - sigmoid(x))) | Elfwing et al., 2018
flatten_t_swish | where(x >= 0, x*sigmoid(x) - 0.2, -0.2) | Chieng et al., 2018
swish_t | x*sigmoid(x) + 0.1*tanh(x) | Seo et al., 2024
elish | where(x >= 0, x/(1 + exp(-x)), (exp(x) - 1)/(1 + exp(-x))) | Basirat & Roth, 2018
hard_elish | where(x >= 0, x*max(0, min(1, (x + 1)/2)), (exp(x) - 1)*max(0, min(1, (x + 1)/2))) |
aria_2 | x*(1 + exp(-2*x))**(-1.5) | Patwardhan et al., 2018
eanaf | x*exp(x)/(exp(x) + 2) | Chai et al., 2022
eis_2 | x*log(1 + exp(x))/sqrt(1.16 + x**2) | Biswas et al., 2020: two members of the family EIS
eis_3 | x/(1 + 0.68*exp(-1.7*x)) |
rsigelu | where(x > 1, 0.5*x/(1 + exp(-x)) + x, where(x >= 0, x, (exp(x) - 1)/2)) | Kılıçarslan & Celik, 2021
delu | where(x > 0, 1.5*x + abs(exp(-x) - 1), x*sigmoid(x)) | Pishchik, 2023
softplus_written | log(1 + exp(x)) | Dugas et al., 2001
softplus_sharp | log(1 + exp(2*x))/2 |
logsigmoid_written | log(1/(1 + exp(-x))) |
shifted_softplus | log(0.5*exp(x) + 0.5) | Schütt et al., 2017
softplus_linear | where(x >= 0, x, 2*log((exp(x) + 1)/2)) | Zhao et al., 2018
soft_pp | log(1 + exp(x)) + x/2 - log(2) | Ciuparu et al., 2020
soft_clipping | log((1 + exp(5*x))/(1 + exp(5*(x - 1))))/5 | Klimek & Perelstein, 2018
log_cosh | log(cosh(x)) | known from the loss of that name
nlrelu | log(0.5*max(0, x) + 1) | Y. Liu et al., 2019
mish_written | x*tanh(log(1 + exp(x))) | Misra, 2019
serf | x*erf(log(1 + exp(x))) | Nag et al., 2021
logish | x*log(1 + sigmoid(x)) | H. Zhu et al., 2021
smish | x*tanh(log(1 + sigmoid(x))) | X. Wang et al., 2022
gish | x*log(2 - exp(-exp(x))) | Kaytan et al., 2023
erf_unit | erf(x) |
gelu_written | 0.5*x*(1 + erf(x/sqrt(2))) | Hendrycks & Gimpel, 2016
gelu_from_erfc | 0.5*x*erfc(-x/sqrt(2)) |
gelu_tanh_written | 0.5*x*(1 + tanh(sqrt(2/pi)*(x + 0.044715*x**3))) |
gelu_tanh_from_exp | x*(1 - 1/(exp(2*sqrt(2/pi)*(x + 0.044715*x**3)) + 1)) |
sgelu | x*erf(x/sqrt(2)) | Yu & Su, 2019
smu | ((1 + 0.25)*x + (1 - 0.25)*x*erf((1 - 0.25)*x))/2 | Biswas et al., 2021: the smooth maximum unit
erf_relu | where(x >= 0, x, 0.5*erf(x)) | Rajanand & Singh, 2023
phish | x*tanh(gelu(x)) | Naveen, 2022
hexpo | where(x >= 0, -(exp(-x) - 1), 2*(exp(x/3) - 1)) | Kong & Takatsuka, 2017
loglog | exp(-exp(-x)) | Gomes & Ludermir, 2008
cloglog | 1 - exp(-exp(x)) |
gaussian | exp(-x**2) | Broomhead & Lowe, 1988
gaussian_wavelet | -x*exp(-x**2/2) | Zhang & Benveniste, 1992; Alexandridis & Zapranis, 2013: wavelets
mexican_hat | (1 - x**2)*exp(-x**2/2) |
morlet | cos(1.75*x)*exp(-x**2/2) |
resech | 2*x/(exp(x) + exp(-x)) | Njikam & Zhao, 2016
pelu | where(x >= 0, x/2, elu(x/2)) | Trottier et al., 2017
reu | where(x > 0, x, x*exp(x)) | Ying et al., 2019
colu | x/(1 - x*exp(-(x + exp(x)))) | Vagerwal, 2021
soft_root_sign | x/(x/2 + exp(-x/3)) | Zhou et al., 2020: the denominator has no zero, for 2·e/3 > 1
xielu | where(x > 0, 0.8*x**2 + 0.5*x, (expm1(min(x, 0)) - x)*0.8 + 0.5*x) | Huang & Schlag, 2025
sine | sin(x) | Sopena et al., 1999
gcu | x*cos(x) | Noel et al., 2021
asu | x*sin(x) | Rahman et al., 2023
snake | x + sin(x)**2 | Ziyin et al., 2020
sinlu | (x + 0.5*sin(x))*sigmoid(x) | Paul et al., 2022
coslu | (x + cos(x))*sigmoid(x) | Pishchik, 2023
sine_relu | where(x > 0, x, 0.0025*(sin(x) - cos(x))) | Rodrigues, 2018
sqnl | where(x > 2, 1, where(x >= 0, x - x**2/4, where(x >= -2, x + x**2/4, -1))) | Wuraola & Patel, 2018
s_shaped_relu | where(x >= 1, 1 + 0.5*(x - 1), where(x <= -1, -1 + 0.2*(x + 1), x)) | Jin et al., 2016
plu | max(0.1*(x + 1) - 1, min(0.1*(x - 1) + 1, x)) | Nicolae, 2018
star_relu | 0.8944*relu(x)**2 - 0.4472 | Yu et al., 2022
hard_mish | x/2*min(2, max(0, x + 2)) | Misra's hard variant of Mish
hard_swish_of_relu6 | x*relu6(x + 3)/6 | Howard et al., 2019
ncu | x - x**3 | Noel et al., 2021
squ | x**2 + x |
"""
LITERATURE = dict(map(str.strip, row.split(" |")[:2]) for row in TABLE.strip().splitlines())
